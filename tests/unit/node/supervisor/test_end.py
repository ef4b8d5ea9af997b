"""A supervisor records how its node ended, and waits for its peers."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.node import supervisor
from hpc_ddp.node.outcome import oom as oom_module
from hpc_ddp.node.supervisor import Supervisor
from unit.fakes import Clock
from unit.node.supervisor.fakes import COMMAND, Agent, make_supervisor


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
def test_the_end_of_a_supervisor_depends_on_notice_peers_and_leader(
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
        supervisor, "take_over_verdict", lambda place, env, reports: decided.append(reports())
    )
    words = [*COMMAND[:4], "--nnodes=1:3" if elastic else "--nnodes=3", "train.py", "--a=:"]
    watcher = make_supervisor(attempt, *words, index=index)
    watcher.notice, watcher.torn_down = notice, torn_down
    if superseded:
        watcher.place.run.claim_attempt({}, lambda identity: False)
    for node in ("n1", "n2", "n3"):
        attempt.node(node).path.mkdir(exist_ok=True)
        attempt.node(node).record.touch()
    assert watcher._conclude(code) == ended
    has_left = failed == "left"
    assert attempt.failed.read_text() == ("" if has_left else failed)
    assert decided == ([False] if has_left else [])
    assert bool(clock.slept) is (ended == 1 and not has_left)  # for the peers' ends
    record = read_json(watcher.folder.record)
    assert (record["code"], record["notice"], record["torn_down"]) == (code, notice, torn_down)
    assert record["left"] is has_left


@pytest.mark.parametrize(
    ("code", "is_late", "notice", "ended"),
    [(-15, True, "SIGTERM", 0), (-15, False, None, 1), (0, False, None, 0), (1, False, None, 1)],
)
def test_a_signal_that_comes_to_the_worker_first_is_a_notice(
    attempt: AttemptFolder,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    is_late: bool,
    notice: str | None,
    ended: int,
) -> None:
    """`scancel -s TERM` reaches all processes of the step: a plain worker is dead at once."""
    watcher, agent = make_supervisor(attempt), Agent(code)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        if agent.looks > 2:  # the worker has ended
            waits.append(seconds)
            watcher.signals.seen += [signal.SIGTERM] * is_late

    monkeypatch.setattr(watcher.signals, "wait", wait)
    monkeypatch.setattr(Supervisor, "_start", lambda watcher: agent)
    assert watcher.run() == ended
    assert read_json(watcher.folder.record)["notice"] == notice
    assert bool(waits) is (code == -15)


@pytest.mark.parametrize("code", [0, -15])
def test_a_signal_in_the_last_moment_is_a_notice(
    attempt: AttemptFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Also before an end with 0: that of a script that has heeded it."""
    watcher, agent = make_supervisor(attempt), Agent(code)
    poll = agent.poll

    def end() -> int | None:
        if poll() is not None:
            watcher.signals.seen.append(signal.SIGTERM)
        return agent.returncode if agent.looks > 2 else None

    monkeypatch.setattr(agent, "poll", end)
    monkeypatch.setattr(Supervisor, "_start", lambda watcher: agent)
    assert watcher.run() == 0
    assert read_json(watcher.folder.record)["notice"] == "SIGTERM"


def test_a_failed_worker_is_no_lost_leader(attempt: AttemptFolder, clock: Clock) -> None:
    watcher = make_supervisor(
        attempt, *COMMAND[:4], "--nnodes=1:3", "train.py", index=1, nodes=("n0", "n1")
    )
    watcher.folder.failures.write_text(
        json.dumps({"failures": [{"rank": 1, "code": 1, "time": 5.0}]})
    )
    assert watcher._conclude(1) == 0
    assert read_json(watcher.folder.record)["left"] is False
    assert attempt.failed.read_text() == "n1"


def test_the_peers_ends_are_awaited_for_a_bounded_time(
    attempt: AttemptFolder, clock: Clock
) -> None:
    watcher = make_supervisor(attempt)
    for node in ("n1", "n2", "n3"):
        attempt.node(node).path.mkdir(exist_ok=True)
    attempt.node("n1").record.touch()
    attempt.node("n3").record.touch()
    watcher._end_peers()
    assert supervisor.PEERS_S <= sum(clock.slept) < supervisor.PEERS_S + 0.3
    clock.slept.clear()
    attempt.node("n2").record.touch()
    watcher._end_peers()
    assert len(clock.slept) == 1
    assert watcher.launch.peers == [attempt.node(node).record for node in ("n1", "n2", "n3")]


def test_no_peer_is_awaited_if_a_port_was_taken(attempt: AttemptFolder, clock: Clock) -> None:
    attempt.port_taken.touch()
    assert make_supervisor(attempt)._conclude(1) == 1
    assert clock.slept == []


def test_an_end_that_can_not_be_recorded_is_reported(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(write: Callable[[], object], patience_s: float) -> None:
        raise OSError("Stale file handle")

    watcher = make_supervisor(attempt)
    monkeypatch.setattr(supervisor, "patiently", gone)
    assert watcher._conclude(0) == 0
    assert "n1 can't record how it ended: Stale file handle" in capsys.readouterr().err


def test_causes_of_the_workers_deaths_are_read(
    attempt: AttemptFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = make_supervisor(attempt)
    reports = [{"rank": rank, "code": code, "time": 5.0} for rank, code in enumerate((1, -9, -11))]
    watcher.folder.failures.write_text(json.dumps({"failures": reports}))
    watcher.folder.rank_log(0).write_text(
        "Traceback (most recent call last):\n  x\nValueError: a\n"
    )
    watcher.folder.rank_log(1).write_text(
        "Traceback (most recent call last):\n  x\nValueError: b\n"
    )
    failures = watcher._collect_failures(1)
    assert [failure["error"] for failure in failures] == ["ValueError: a", "", ""]
    monkeypatch.setattr(oom_module, "count_kills", lambda: watcher._oom_kills + 1)
    assert [failure["error"] for failure in watcher._collect_failures(1)] == [
        "ValueError: a",
        oom_module.KILLED,
        "",
    ]
    watcher.folder.failures.write_text("{}")
    assert watcher._collect_failures(-9) == [
        {"rank": None, "code": -9, "time": 1000.0, "error": oom_module.KILLED, "last_line": ""}
    ]
    # A library has ended torchrun.
    watcher.folder.agent_log.write_text("W: x\nOpenBLAS error: Memory allocation failed\n\n")
    watcher._oom_kills = oom_module.count_kills()
    (failure,) = watcher._collect_failures(1)
    assert (failure["error"], failure["last_line"]) == (
        "",
        "OpenBLAS error: Memory allocation failed",
    )
    watcher.folder.failures.write_text('{"agent": "RendezvousError: late"}')
    (failure,) = watcher._collect_failures(1)
    assert (failure["error"], failure["last_line"]) == ("RendezvousError: late", "")
