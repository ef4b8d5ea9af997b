"""A supervisor decides what signals, notices and deadlines mean."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.process import NOTICE_SIGNALS
from hpc_ddp.node import supervisor
from hpc_ddp.node.supervisor import Supervisor
from hpc_ddp.node.watch.agent_watch import LOOK_EVERY_S, MOST_LOOKS
from hpc_ddp.node.watch.look_times import FENCE_EVERY_S
from hpc_ddp.node.watch.received_signals import Signals
from hpc_ddp.node.watch.wake_links import PeerLinks
from tests.raw_events import raw_events
from unit.fakes import Clock
from unit.node.supervisor.fakes import make_agent, make_supervisor, write_pids


def test_signals_wake_a_supervisor_and_a_childs_end_is_none() -> None:
    numbers = (*NOTICE_SIGNALS, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    woken_by = signal.set_wakeup_fd(-1)
    signals = Signals()
    try:
        for number in numbers:
            os.kill(os.getpid(), number)
            signals.wait(60)
        assert signals.seen == list(NOTICE_SIGNALS)
        signals.wait(0)
    finally:
        signal.set_wakeup_fd(woken_by)
        for end in (signals._read, signals._write):
            end.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_is_a_notice(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = make_supervisor(attempt, notice_signal=signal.SIGUSR1), make_agent()
    write_pids(watcher, 41, 42)
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
    watcher, agent = make_supervisor(attempt), make_agent()
    (watcher.folder.path / "rank-0.pid").touch()  # not yet written
    watcher.signals.seen += [signal.SIGTERM]
    watcher._poll(agent)
    assert (sent, agent.killed) == ([], True)
    assert attempt.notice.read_text() == ""  # Slurm signals all nodes


def test_the_notice_of_a_clock_that_is_ahead_is_that_of_all_nodes(
    attempt: AttemptFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their workers would wait for this one's, which do not start."""
    woken: list[str] = []
    monkeypatch.setattr(PeerLinks, "wake", lambda links: woken.append(attempt.notice.read_text()))
    watcher, agent = make_supervisor(attempt, end_time=900.0, index=1), make_agent()
    watcher._poll(agent)
    assert (watcher.notice, agent.killed, woken) == ("time limit", True, ["time limit"])
    other, agent = make_supervisor(attempt, end_time=9000.0), make_agent()
    other._poll(agent)
    assert (other.notice, agent.killed) == ("time limit", True)


def test_workers_that_can_not_be_seen_are_given_their_time(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    """In a container they read the notice by themselves."""
    watcher, agent = make_supervisor(attempt, end_time=1060.0), make_agent()
    (watcher.folder.path / "rank-0.pid").write_text("1 then pid:[1]")
    watcher.signals.seen += [signal.SIGTERM]
    watcher._poll(agent)
    assert (watcher.notice, sent, agent.killed) == ("SIGTERM", [], False)
    clock.now += 59.0
    watcher._poll(agent)
    assert not agent.killed
    clock.now += 1.0
    watcher._poll(agent)
    assert agent.killed


def test_workers_whose_folder_a_user_has_removed_are_given_their_time(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    """They read the node's own notice."""
    watcher, agent = make_supervisor(attempt, end_time=1060.0), make_agent()
    shutil.rmtree(watcher.folder.path)
    watcher.signals.seen += [signal.SIGTERM]
    watcher._poll(agent)
    assert (watcher.notice, sent, agent.killed) == ("SIGTERM", [], False)


def test_a_signal_after_a_peers_failure_is_a_teardown(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = make_supervisor(attempt), make_agent()
    write_pids(watcher, 41)
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
def test_marks_and_deadlines_become_notices_and_teardowns(
    attempt: AttemptFolder,
    clock: Clock,
    failed: str,
    word: str,
    end_time: float | None,
    notice: str | None,
    torn_down: str | None,
) -> None:
    watcher = make_supervisor(attempt, end_time=end_time)
    attempt.failed.write_text(failed)
    attempt.notice.write_text(word)
    watcher._poll(make_agent())
    assert (watcher.notice, watcher.torn_down) == (notice, torn_down)


def test_a_supervisor_at_work_has_a_beat(attempt: AttemptFolder, clock: Clock) -> None:
    watcher, beats = make_supervisor(attempt), []
    path = Path(watcher.local_notice.env()["HPC_DDP_LOCAL_NOTICE"])
    for _ in range(3):
        watcher._poll(make_agent())
        beats.append(json.loads(path.read_text())["beat"])
        clock.now += 0.5
    assert beats == [1000.0, 1000.0, 1001.0]


def test_logs_are_polled_once_a_second(
    attempt: AttemptFolder, clock: Clock, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    watcher, shown = make_supervisor(attempt), []
    for number in range(4):
        with open(watcher.folder.rank_log(0), "a") as log:
            log.write(str(number))
        watcher._poll(make_agent())
        shown.append(capfdbinary.readouterr().out)
        clock.now += 0.5
    assert shown == [b"0", b"", b"12", b""]


def test_workers_alive_after_a_notice_are_killed_before_the_end(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = make_supervisor(attempt, end_time=1010.0, warn_s=60.0), make_agent()
    write_pids(watcher, 41)
    watcher._poll(agent)
    clock.now = 1009.9
    watcher._poll(agent)
    assert not agent.killed
    clock.now = 1010.0
    watcher._poll(agent)
    assert agent.killed
    assert sent == [(41, signal.SIGTERM), (41, signal.SIGKILL)]


def test_a_script_that_ignores_the_notice_is_announced_and_ended(
    attempt: AttemptFolder,
    clock: Clock,
    sent: list[tuple[int, int]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A dry run writes the end after the notice; `end_time` was unknown until then."""
    watcher, agent = make_supervisor(attempt, warn_s=60.0), make_agent()
    write_pids(watcher, 41)
    watcher.signals.seen.append(signal.SIGTERM)
    watcher._poll(agent)
    attempt.end_time.write_text(f"{clock.now + 30:.0f}")
    said = []
    for _ in range(4):
        clock.now += 10.0
        watcher._poll(agent)
        said.append(capfd.readouterr().err)
    assert (
        said[0] == "hpc-ddp: the script still runs, 10 s after the notice; it is killed in 20 s\n"
    )
    assert said[1] == ""
    assert said[2].endswith("has not ended since the notice, and its time is over: it is killed\n")
    assert (agent.killed, said[3]) == (True, "")
    watcher._conclude(-9)
    assert read_json(watcher.folder.record)["killed"] is True


def test_a_torchrun_that_does_not_end_after_its_workers_is_killed(
    attempt: AttemptFolder, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that is stopped kept its nodes until the time limit. Its peers are left alone: an
    evaluation may go on there."""
    watcher, agent = make_supervisor(attempt), make_agent()
    write_pids(watcher, 41)  # ended long ago
    for _ in range(MOST_LOOKS - 1):
        watcher._poll(agent)
        clock.now += LOOK_EVERY_S
    assert not agent.killed
    watcher._poll(agent)
    assert agent.killed
    assert "torchrun on n1 has not ended after its workers: it is killed" in capfd.readouterr().err
    assert watcher._conclude(-9) == 0
    assert read_json(watcher.folder.record)["idle"] is True
    assert not attempt.failed.read_text()


def test_the_end_of_a_preempted_job_is_slurms_to_know(
    attempt: AttemptFolder, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    watcher, other = make_supervisor(attempt), make_supervisor(attempt, index=1)
    for supervised in (watcher, other):
        supervised.signals.seen.append(signal.SIGTERM)
        write_pids(supervised, 41)
        supervised._poll(make_agent())
        clock.now += 10.0
        supervised._poll(make_agent())
    said = capfd.readouterr().err
    assert said.count("it is killed when its time is over") == 1  # of the first node alone


def test_a_late_notice_leaves_the_workers_time(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = make_supervisor(attempt, end_time=900.0), make_agent()
    write_pids(watcher, 41)
    for _ in range(2):
        watcher._poll(agent)
        assert (sent, agent.killed) == ([(41, signal.SIGTERM)], False)
        clock.now += 5.0
    watcher._poll(agent)
    assert agent.killed


def test_a_suspended_job_has_another_end(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    """The batch side asks for it when the job runs again; until then no end is known."""
    watcher, agent = make_supervisor(attempt, end_time=1100.0, warn_s=60.0), make_agent()
    write_pids(watcher, 41)
    watcher._poll(agent)
    clock.now = 1200.0
    watcher._poll(agent)
    attempt.end_time.write_text("1300")
    watcher.folder.rank_log(0).write_text("at once, also after the pause\n")
    for _ in range(7):
        clock.now += 5.0
        watcher._poll(agent)
        assert (sent, agent.killed) == ([], False), clock.now
        assert watcher.folder.printed.exists()
    clock.now = 1241.0
    watcher._next_poll = 0.0
    watcher._poll(agent)
    assert sent == [(41, signal.SIGTERM)]


@pytest.mark.parametrize(
    ("pause_s", "then_s", "stood_still"),
    [(24.0, 50.0, True), (24.0, 61.0, False), (9.0, 5.0, False)],
)
def test_an_end_right_after_a_suspension_says_so(
    attempt: AttemptFolder, clock: Clock, pause_s: float, then_s: float, stood_still: bool
) -> None:
    watcher, agent = make_supervisor(attempt), make_agent()
    watcher._poll(agent)
    clock.now += pause_s
    watcher._poll(agent)
    clock.now += then_s
    watcher._conclude(1)
    assert read_json(watcher.folder.record)["stood_still"] is stood_still


def test_a_teardown_is_not_killed_at_the_time_limit(attempt: AttemptFolder, clock: Clock) -> None:
    watcher, agent = make_supervisor(attempt, end_time=1010.0), make_agent()
    watcher.torn_down = "n2"
    clock.now = 1020.0
    watcher._poll(agent)
    assert not agent.killed


def test_a_notice_needs_no_disk(
    attempt: AttemptFolder,
    clock: Clock,
    sent: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watcher, agent = make_supervisor(attempt), make_agent()
    write_pids(watcher, 41)

    def full(path: Path, content: dict[str, Any]) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(supervisor, "write_json", full)
    watcher.signals.seen += [signal.SIGINT]
    watcher._poll(agent)
    assert (watcher.notice, sent) == ("SIGINT", [(41, signal.SIGTERM)])
    assert local_notice(watcher) == {"source": "SIGINT"}


def local_notice(watcher: Supervisor) -> dict[str, Any]:
    """Return what the workers read."""
    text = Path(watcher.local_notice.env()["HPC_DDP_LOCAL_NOTICE"]).read_text()
    fields: dict[str, Any] = json.loads(text or "{}")
    fields.pop("beat", None)
    return fields


def test_a_failure_wakes_the_peers(
    attempt: AttemptFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[str] = []
    monkeypatch.setattr(PeerLinks, "wake", lambda links: woken.append(attempt.failed.read_text()))
    make_supervisor(attempt, index=1)._conclude(1)
    assert woken == ["n2"]  # once the file has it
    other, agent = make_supervisor(attempt, index=2), make_agent()
    for _ in range(2):
        other._poll(agent)
        clock.now += 2.0
    assert woken == ["n2", "n2"]


def test_another_end_of_the_time_is_passed_on(attempt: AttemptFolder, clock: Clock) -> None:
    watcher = make_supervisor(attempt, end_time=9000.0)
    watcher._poll(make_agent())
    assert local_notice(watcher) == {}
    attempt.end_time.write_text("8000")
    watcher._poll(make_agent())
    assert (watcher.end_time, local_notice(watcher)) == (8000.0, {"end_time": 8000.0})


def test_a_superseded_attempt_is_ended(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = make_supervisor(attempt), make_agent()
    watcher._poll(agent)
    watcher.place.run.claim_attempt({}, lambda identity: False)
    clock.now += FENCE_EVERY_S - 1
    watcher._poll(agent)
    assert (watcher.torn_down, agent.killed) == (None, False)
    clock.now += 1
    watcher._poll(agent)
    assert (watcher.torn_down, agent.killed) == ("a later attempt", True)
    clock.now += FENCE_EVERY_S
    watcher._poll(agent)
    assert watcher._kill_at < clock.now  # set once


def test_a_disk_that_is_away_kills_no_worker(
    attempt: AttemptFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(path: Path) -> None:
        raise OSError(5, "Input/output error")

    watcher, agent = make_supervisor(attempt, end_time=1010.0, warn_s=60.0), make_agent()
    write_pids(watcher, 41)
    monkeypatch.setattr(os, "listdir", raise_error)
    watcher._poll(agent)
    assert (watcher.notice, watcher.torn_down, agent.killed) == ("time limit", None, False)
    assert not watcher._is_superseded()


def test_a_clock_that_is_set_moves_no_wait(
    attempt: AttemptFolder, clock: Clock, sent: list[tuple[int, int]]
) -> None:
    watcher, agent = make_supervisor(attempt), make_agent()
    write_pids(watcher, 41)
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
