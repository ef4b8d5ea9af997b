"""What a node's supervisor does, step by step; its workers and its clock are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from hpc_ddp.core import process
from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.run_folder import AttemptFolder
from hpc_ddp.node import supervisor
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.outcome import head_failover
from hpc_ddp.node.outcome import oom as oom_module
from hpc_ddp.node.supervisor import Signals, Supervisor, expand, split, torchrun_launch
from tests.raw_events import raw_events
from unit.fakes import Clock, stop_clock
from unit.node.fakes import NoSignals, place_of

COMMAND = ["python", "node.py", "agent", "--nnodes=2", "--rdzv-conf=a=1", "train.py", "--lr=1"]


class Agent:
    """A torchrun that ends with `returncode` at the third look."""

    def __init__(self, returncode: int = 0) -> None:
        self.returncode = returncode
        self.looks = 0
        self.killed = False

    def poll(self) -> int | None:
        self.looks += 1
        return self.returncode if self.looks > 2 or self.killed else None

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(oom_module, "kills", lambda: 0)
    return stop_clock(monkeypatch, supervisor)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The signals that were sent, as process id and number."""
    result: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: result.append((pid, number)))
    monkeypatch.setattr(process, "_began", lambda pid: "then")
    return result


def _supervisor(attempt: AttemptFolder, *command: str, **values: Any) -> Supervisor:
    signals = cast(Signals, NoSignals())
    place = place_of(attempt, **values)
    return Supervisor(place, torchrun_launch(place, list(command or COMMAND)), signals)


def _workers(watcher: Supervisor, *pids: int) -> None:
    for rank, pid in enumerate(pids):
        (watcher.folder.path / f"rank-{rank}.pid").write_text(f"{pid} then")


def test_variables_are_filled_in_for_torchrun_and_not_for_the_script() -> None:
    words = ["$A", "node.py", "agent", "--rdzv-id=$ID", "--x=${ID}", "train.py", "--lr=$ID"]
    assert expand(words, {"ID": "7"}) == [*words[:3], "--rdzv-id=7", "--x=7", *words[5:]]
    assert split(["--a=1", "train.py", "--b"]) == (["--a=1"], ["train.py", "--b"])


@pytest.mark.parametrize(("index", "is_host"), [(0, "1"), (1, "0")])
def test_each_node_knows_the_host_of_the_store(
    attempt: AttemptFolder, index: int, is_host: str
) -> None:
    watcher = _supervisor(attempt, index=index)
    conf, address = f"--rdzv-conf=a=1,is_host={is_host}", f"--local-addr=n{index + 1}"
    assert watcher.launch.command == [*COMMAND[:5], conf, address, *COMMAND[5:]]
    plain = _supervisor(attempt, *COMMAND[:3], "train.py", index=index)
    assert plain.launch.command[3] == f"--rdzv-conf=is_host={is_host}"


def test_the_workers_environment(attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "interface_env", lambda place: {"A": "1"})
    watcher = _supervisor(attempt, index=1)
    env = watcher._env()
    assert (env["HPC_DDP_NODE"], env["A"]) == ("n2", "1")
    assert env["HPC_DDP_NODE_FOLDER"] == str(attempt.path / "n2")
    assert env["HPC_DDP_NOTICE"] == str(watcher.folder.notice)


# --- signals -------------------------------------------------------------------------------


def test_signals_wake_it_and_a_childs_end_is_none() -> None:
    numbers = (*supervisor.NOTICE_SIGNALS, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    woken_by = signal.set_wakeup_fd(-1)
    signals = Signals()
    try:
        for number in numbers:
            os.kill(os.getpid(), number)
            signals.wait(60)
        assert signals.seen == list(supervisor.NOTICE_SIGNALS)
        signals.wait(0)
    finally:
        signal.set_wakeup_fd(woken_by)
        for end in (signals._read, signals._write):
            end.close()
        for number, handler in before.items():
            signal.signal(number, handler)


# --- from start to end ---------------------------------------------------------------------


def _run(watcher: Supervisor, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(watcher, "_start", lambda: agent)
    return watcher.run()


def test_a_node_whose_peer_has_failed_already_does_not_start(attempt: AttemptFolder) -> None:
    attempt.failed.write_text("n2")
    assert _supervisor(attempt).run() == 1
    assert not (attempt.node("n1").record).exists()


def test_a_start_begins_without_what_an_earlier_one_left(attempt: AttemptFolder) -> None:
    folder = attempt.node("n1")
    folder.path.mkdir()
    for path in (folder.failures, folder.path / "rank-0.pid"):
        path.touch()
    _supervisor(attempt)
    assert list(folder.path.iterdir()) == []


def test_a_python_that_is_not_there_is_recorded(attempt: AttemptFolder, clock: Clock) -> None:
    watcher = _supervisor(attempt, "/no/python", "node.py", "agent", "train.py", nodes=("n1",))
    assert watcher.run() == 1
    (failure,) = read_json(watcher.folder.record)["failures"]
    assert (failure["rank"], failure["code"]) == (None, 127)
    assert "No such file or directory: '/no/python'" in failure["error"]


def test_a_start_that_ends_well(
    attempt: AttemptFolder,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    watcher = _supervisor(attempt)
    watcher.folder.rank_log(0).write_bytes(b"hello\xff\n")
    assert _run(watcher, Agent(), monkeypatch) == 0
    assert capfdbinary.readouterr().out == b"hello\xff\n"
    assert read_json(watcher.folder.record) == {
        **{"node": "n1", "code": 0, "notice": None, "torn_down": None},
        **{"left": False, "failures": []},
    }
    assert watcher.folder.printed.read_text().endswith(" 0 7\n")
    assert not attempt.failed.read_text()


def test_an_elastic_node_without_its_leader_is_killed(
    attempt: AttemptFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = threading.Event()
    lost.set()
    monkeypatch.setattr(head_failover, "watch", lambda place, environ: lost)
    monkeypatch.setattr(head_failover, "decide", lambda *words: None)
    agent = Agent(-9)
    watcher = _supervisor(attempt, *COMMAND[:3], "--nnodes=1:2", "train.py", index=1)
    watcher._kill_at = 0.0
    assert _run(watcher, agent, monkeypatch) == 1
    assert agent.killed
    rigid = Agent(0)
    assert _run(_supervisor(attempt, index=1), rigid, monkeypatch) == 0
    assert not rigid.killed


# --- at each look --------------------------------------------------------------------------


def _torchrun() -> Any:
    """Return an agent, as something that is no `Popen` and can be taken for one."""
    return Agent()


def test_a_signal_is_a_notice(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = _supervisor(attempt, notice_signal=signal.SIGUSR1), _torchrun()
    _workers(watcher, 41, 42)
    watcher.signals.seen += [signal.SIGHUP, signal.SIGTERM]
    watcher._poll(agent)
    assert (watcher.notice, watcher.torn_down) == ("SIGHUP", None)
    assert sorted(sent) == [(41, signal.SIGUSR1), (42, signal.SIGUSR1)]
    assert not agent.killed
    assert read_json(watcher.folder.notice) == {"source": "SIGHUP", "time": 1000.0}
    (event,) = raw_events(watcher.place.run.path)
    assert (event["event"], event["source"]) == ("notice", "SIGHUP")
    watcher.signals.seen += [signal.SIGTERM]
    watcher._poll(agent)  # one is enough
    assert watcher.signals.seen == []
    assert (watcher.notice, len(sent)) == ("SIGHUP", 2)


def test_a_notice_before_there_are_workers_ends_torchrun(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = _supervisor(attempt), _torchrun()
    (watcher.folder.path / "rank-0.pid").touch()  # not yet written
    watcher.signals.seen += [signal.SIGTERM]
    watcher._poll(agent)
    assert (sent, agent.killed) == ([], True)


def test_a_signal_after_a_peers_failure_is_a_teardown(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = _supervisor(attempt), _torchrun()
    _workers(watcher, 41)
    attempt.failed.write_text("n2\n")
    watcher.signals.seen += [signal.SIGTERM]
    watcher._poll(agent)
    assert (watcher.notice, watcher.torn_down) == (None, "n2")
    assert not watcher.folder.notice.exists()
    clock.now += supervisor.TEARDOWN_S - 0.1
    watcher._poll(agent)
    assert (sent, agent.killed) == ([(41, signal.SIGTERM)], False)
    clock.now += 0.2
    watcher._poll(agent)
    assert (sent[1:], agent.killed) == ([(41, signal.SIGKILL)], True)


@pytest.mark.parametrize(
    ("failed", "word", "end_time", "notice", "torn_down"),
    [
        ("", "", None, None, None),
        ("n1", "", None, None, None),  # its own mark
        ("n2", "warning signal", None, None, "n2"),
        ("", "warning signal", 1000.0, "warning signal", None),
        ("", "", 1060.0, "time limit", None),
        ("", "", 1061.0, None, None),
    ],
)
def test_it_looks_around(
    attempt: AttemptFolder,
    clock: Clock,
    failed: str,
    word: str,
    end_time: float | None,
    notice: str | None,
    torn_down: str | None,
) -> None:
    watcher = _supervisor(attempt, end_time=end_time)
    attempt.failed.write_text(failed)
    attempt.notice.write_text(word)
    watcher._poll(_torchrun())
    assert (watcher.notice, watcher.torn_down) == (notice, torn_down)


def test_it_looks_around_once_a_second(
    attempt: AttemptFolder, clock: Clock, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    watcher, shown = _supervisor(attempt), []
    for number in range(4):
        with open(watcher.folder.rank_log(0), "a") as log:
            log.write(str(number))
        watcher._poll(_torchrun())
        shown.append(capfdbinary.readouterr().out)
        clock.now += 0.5
    assert shown == [b"0", b"", b"12", b""]


def test_what_a_notice_leaves_alive_is_killed_before_slurm_does_it(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = _supervisor(attempt, end_time=1010.0, warn_s=60.0), _torchrun()
    _workers(watcher, 41)
    watcher._poll(agent)
    clock.now = 1009.9
    watcher._poll(agent)
    assert not agent.killed
    clock.now = 1010.0
    watcher._poll(agent)
    assert agent.killed
    assert sent == [(41, signal.SIGTERM), (41, signal.SIGKILL)]


def test_a_notice_that_comes_late_is_a_notice(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = _supervisor(attempt, end_time=900.0), _torchrun()
    _workers(watcher, 41)
    for _ in range(2):
        watcher._poll(agent)
        assert (sent, agent.killed) == ([(41, signal.SIGTERM)], False)
        clock.now += 5.0
    watcher._poll(agent)
    assert agent.killed


def test_after_a_suspension_slurm_has_another_end(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    """The batch side asks for it when the job runs again; until then no end is known."""
    watcher, agent = _supervisor(attempt, end_time=1100.0, warn_s=60.0), _torchrun()
    _workers(watcher, 41)
    watcher._poll(agent)
    clock.now = 1200.0
    watcher._poll(agent)
    attempt.end_time.write_text("1300")
    for _ in range(7):
        clock.now += 5.0
        watcher._poll(agent)
        assert (sent, agent.killed) == ([], False), clock.now
    clock.now = 1241.0
    watcher._next_poll = 0.0
    watcher._poll(agent)
    assert sent == [(41, signal.SIGTERM)]


def test_without_a_notice_the_end_is_slurms(attempt: AttemptFolder, clock: Clock) -> None:
    watcher, agent = _supervisor(attempt, end_time=1010.0), _torchrun()
    watcher.torn_down = "n2"
    clock.now = 1020.0
    watcher._poll(agent)
    assert not agent.killed


def test_a_notice_that_can_not_be_written_is_given_later(
    attempt: AttemptFolder,
    clock: Clock,
    sent: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watcher, agent = _supervisor(attempt), _torchrun()
    _workers(watcher, 41)

    def full(path: Path, value: dict[str, Any]) -> None:
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "write_json", full)
        watcher.signals.seen += [signal.SIGINT]
        watcher._poll(agent)
    assert (watcher.notice, sent) == (None, [])
    clock.now += supervisor.POLL_EVERY_S
    watcher._poll(agent)
    assert (watcher.notice, sent) == ("SIGINT", [(41, signal.SIGTERM)])


def test_what_a_later_attempt_has_replaced_is_ended(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = _supervisor(attempt), _torchrun()
    watcher._poll(agent)
    watcher.place.run.claim_attempt({}, lambda info: False)
    clock.now += supervisor.FENCE_EVERY_S - 1
    watcher._poll(agent)
    assert (watcher.torn_down, agent.killed) == (None, False)
    clock.now += 1
    watcher._poll(agent)
    assert (watcher.torn_down, agent.killed) == ("a later attempt", True)
    clock.now += supervisor.FENCE_EVERY_S
    watcher._poll(agent)
    assert watcher._kill_at < clock.now  # set once


# --- the end -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "notice", "torn_down", "index", "elastic", "superseded", "ended", "failed"),
    [
        (0, None, None, 0, False, False, 0, ""),
        (1, "SIGTERM", None, 0, False, False, 0, ""),
        (1, None, None, 0, False, False, 1, "n1"),
        (1, None, "n2", 0, False, False, 1, ""),
        (1, None, None, 0, False, True, 0, ""),
        (1, None, None, 0, True, False, 1, "n1"),
        (1, None, None, 1, True, False, 1, "left"),
        (1, None, None, 1, False, False, 0, "n2"),  # the first one's code ends the step
        (1, None, "n1", 1, False, False, 0, ""),
    ],
)
def test_how_it_ends(
    attempt: AttemptFolder,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    notice: str | None,
    torn_down: str | None,
    index: int,
    elastic: bool,
    superseded: bool,
    ended: int,
    failed: str,
) -> None:
    decided: list[bool] = []
    monkeypatch.setattr(
        head_failover, "decide", lambda place, env, reports: decided.append(reports())
    )
    words = [*COMMAND[:3], "--nnodes=1:3" if elastic else "--nnodes=3", "train.py", "--a=:"]
    watcher = _supervisor(attempt, *words, index=index)
    watcher.notice, watcher.torn_down = notice, torn_down
    if superseded:
        watcher.place.run.claim_attempt({}, lambda info: False)
    for node in ("n1", "n2", "n3"):
        attempt.node(node).path.mkdir(exist_ok=True)
        attempt.node(node).record.touch()
    assert watcher._end(code) == ended
    left = failed == "left"
    assert attempt.failed.read_text() == ("" if left else failed)
    assert decided == ([False] if left else [])
    assert bool(clock.slept) is (ended == 1 and not left)  # for the peers' ends
    record = read_json(watcher.folder.record)
    assert (record["code"], record["notice"], record["torn_down"]) == (code, notice, torn_down)
    assert record["left"] is left


def test_a_failed_worker_is_no_lost_leader(attempt: AttemptFolder, clock: Clock) -> None:
    watcher = _supervisor(
        attempt, *COMMAND[:3], "--nnodes=1:3", "train.py", index=1, nodes=("n0", "n1")
    )
    watcher.folder.failures.write_text(
        json.dumps({"failures": [{"rank": 1, "code": 1, "time": 5.0}]})
    )
    assert watcher._end(1) == 0
    assert read_json(watcher.folder.record)["left"] is False
    assert attempt.failed.read_text() == "n1"


def test_it_waits_for_each_peers_end_and_not_for_ever(attempt: AttemptFolder, clock: Clock) -> None:
    watcher = _supervisor(attempt)
    for node in ("n1", "n2", "n3"):
        attempt.node(node).path.mkdir(exist_ok=True)
    attempt.node("n1").record.touch()
    attempt.node("n3").record.touch()
    watcher._wait_for_peers()
    assert supervisor.PEERS_S <= sum(clock.slept) < supervisor.PEERS_S + 0.3
    clock.slept.clear()
    attempt.node("n2").record.touch()
    watcher._wait_for_peers()
    assert len(clock.slept) == 1
    assert watcher.launch.peers == [attempt.node(node).record for node in ("n1", "n2", "n3")]


def test_the_first_supervisor_alone_looks_for_its_peers(attempt: AttemptFolder) -> None:
    """Each of thousands looking for each would be a square of look-ups on the shared disk."""
    watchers = [_supervisor(attempt, index=index) for index in range(3)]
    assert [len(watcher.launch.peers) for watcher in watchers] == [3, 0, 0]
    attempt.failed.write_text("n2")
    assert [watcher.run() for watcher in watchers] == [1, 0, 0]


def test_a_clock_that_is_set_moves_no_wait(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = _supervisor(attempt), _torchrun()
    _workers(watcher, 41)
    clock.set_back_s = 3600.0
    attempt.failed.write_text("n2")
    watcher._poll(agent)
    clock.set_back_s = 0.0
    clock.now += supervisor.TEARDOWN_S - 0.1
    watcher._poll(agent)
    assert (sent, agent.killed) == ([(41, signal.SIGTERM)], False)
    clock.set_back_s = 3600.0
    clock.now += 0.2
    watcher._poll(agent)
    assert agent.killed


def test_nobody_is_waited_for_where_a_port_was_taken(attempt: AttemptFolder, clock: Clock) -> None:
    attempt.port_taken.touch()
    assert _supervisor(attempt)._end(1) == 1
    assert clock.slept == []


def test_an_end_that_can_not_be_told_is_said(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(write: Callable[[], object]) -> None:
        raise OSError("Stale file handle")

    watcher = _supervisor(attempt)
    monkeypatch.setattr(supervisor, "patiently", gone)
    assert watcher._end(0) == 0
    assert "n1 can't record how it ended: Stale file handle" in capsys.readouterr().err


def test_what_the_workers_died_of(
    attempt: AttemptFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = _supervisor(attempt)
    reports = [{"rank": rank, "code": code, "time": 5.0} for rank, code in enumerate((1, -9, -11))]
    watcher.folder.failures.write_text(json.dumps({"failures": reports}))
    watcher.folder.rank_log(0).write_text(
        "Traceback (most recent call last):\n  x\nValueError: a\n"
    )
    watcher.folder.rank_log(1).write_text(
        "Traceback (most recent call last):\n  x\nValueError: b\n"
    )
    assert [item["error"] for item in watcher._failures(1)] == ["ValueError: a", "", ""]
    monkeypatch.setattr(oom_module, "kills", lambda: 1)
    assert [item["error"] for item in watcher._failures(1)] == [
        "ValueError: a",
        oom_module.KILLED,
        "",
    ]
    watcher.folder.failures.write_text("{}")
    assert watcher._failures(-9) == [
        {"rank": None, "code": -9, "time": 1000.0, "error": oom_module.KILLED}
    ]


def test_a_node_that_can_not_take_part_says_why(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"RUN": attempt.path.parents[1], "ATTEMPT": 0, "STEP_LAUNCHER": "mpirun"}
    for name, value in values.items():
        monkeypatch.setenv(f"HPC_DDP_{name}", str(value))
    monkeypatch.delenv("HPC_DDP_NODE_INDEX", raising=False)
    assert supervisor.main(["x"]) == 1
    assert "this node can't take part: this host, " in capsys.readouterr().err
