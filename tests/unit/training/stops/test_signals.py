"""Signals and files give notices; clocks and supervisors are stand-ins."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_ddp.core import process
from hpc_ddp.training.stops import signals
from hpc_ddp.training.stops.signals import CANCELLED, DEADLINE, NONE, NOTICE, Notices
from tests.waiting import wait_until
from unit.fakes import Clock
from unit.training.fakes import LeftError


@pytest.mark.parametrize(
    ("content", "source"), [('{"source": "USR2"}', "USR2"), ("preemption\n", "preemption")]
)
def test_a_notice_file_names_its_source(tmp_path: Path, content: str, source: str) -> None:
    path = tmp_path / "notice"
    notices = Notices(path)
    cancelled = tmp_path / "cancelled"
    notices.watch_for_cancel(cancelled)
    path.touch()  # empty: no word yet
    notices._read_files()
    assert notices.reason == NONE
    cancelled.touch()
    notices._read_files()
    assert (notices.reason, notices.source) == (CANCELLED, "cancelled")
    path.write_text(content)
    notices._read_files()
    assert (notices.reason, notices.source) == (NOTICE, source)


@pytest.fixture
def local() -> Iterator[Path]:
    """A supervisor's file in memory."""
    number = process.memory_file(process.LOCAL_NOTICE)
    yield Path(f"/proc/self/fd/{number}")
    os.close(number)


def test_a_local_notice_spares_the_disk(
    local: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "notice"
    reads: list[Path] = []
    for name in ("read_word", "read_seconds"):
        monkeypatch.setattr(signals, name, reads.append)
    beat = f'"beat": {clock.now + 60.0}'
    local.write_text(f"{{{beat}}}")
    notices = Notices(disk, local)
    notices.watch_end_time(500.0, tmp_path / "end-time")
    assert reads == [tmp_path / "end-time"]
    for text in (f"{{{beat}}}", f'{{"end_time": 800.0, {beat}}}   ', '{"end_time": 8', "[1]"):
        local.write_text(text)
        notices._read_files()
    assert (notices.reason, notices.end_time) == (NONE, 800.0)
    local.write_text(f'{{"end_time": 700.0, "source": "preemption", {beat}}}')
    notices._read_files()
    assert (notices.reason, notices.source, notices.end_time) == (NOTICE, "preemption", 700.0)
    assert reads == [tmp_path / "end-time"]
    clock.now += signals.DISK_EVERY_S
    notices._read_files()
    assert reads == [tmp_path / "end-time"] * 2
    other = Notices(disk, local)
    local.write_text(f'{{"end_time": 700.0, {beat}}}')
    other._read_files()
    assert other.end_time is None  # of a rank that does not watch the time


@pytest.mark.parametrize("is_pipe", [True, False])
def test_a_file_of_another_process_is_no_local_notice(
    tmp_path: Path, clock: Clock, is_pipe: bool
) -> None:
    """In a PID namespace of the rank's own the supervisor's number may be another process's."""
    disk, file = tmp_path / "notice", tmp_path / "file"
    file.write_text(f'{{"source": "another", "beat": {clock.now}}}')
    numbers = os.pipe() if is_pipe else (os.open(file, os.O_RDONLY),)
    try:
        notices = Notices(disk, Path(f"/proc/self/fd/{numbers[0]}"))
        listener = threading.Thread(target=notices._read_files, daemon=True)
        listener.start()
        listener.join(60)
        assert not listener.is_alive()
        assert notices.reason == NONE
        disk.write_text("preemption")
        notices._read_files()
        assert (notices.reason, notices.source) == (NOTICE, "preemption")
    finally:
        for number in numbers[::-1]:
            os.close(number)


def test_without_its_local_notice_a_rank_asks_the_disk(
    local: Path, tmp_path: Path, clock: Clock
) -> None:
    disk = tmp_path / "notice"
    notices = Notices(disk, tmp_path / "none")
    notices._read_files()
    assert notices.reason == NONE
    disk.write_text("time limit")
    notices._read_files()
    assert (notices.reason, notices.source) == (NOTICE, "time limit")
    local.write_text(f'{{"beat": {clock.now - signals.STALE_S + 1}}}')
    other = Notices(disk, local)
    other._read_files()  # the local one can be read, and holds no notice
    assert other.reason == NONE
    hanging = Notices(disk, local)
    clock.now += 1.0
    hanging._read_files()  # the supervisor has not been at work for a while
    assert hanging.reason == NOTICE
    other._handle_signal(signal.SIGTERM)
    assert (other.reason, other.source) == (NOTICE, "time limit")


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_without_a_supervisor_is_a_notice(
    clock: Clock, printed: list[str], number: signal.Signals
) -> None:
    notices = Notices(None)
    notices._handle_signal(number)
    assert (notices.reason, notices.source) == (NOTICE, number.name)
    more = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
    assert printed == [f"{number.name}: stops and saves after this step{more}"]


def test_a_second_ctrl_c_ends_the_process_and_a_copy_of_the_first_does_not(
    clock: Clock, printed: list[str]
) -> None:
    notices = Notices(None)
    notices._handle_signal(signal.SIGINT)
    clock.now += 1.0
    notices._handle_signal(signal.SIGINT)  # torchrun's copy
    clock.now += 0.1
    notices._handle_signal(signal.SIGTERM)
    with pytest.raises(LeftError, match="130"):
        notices._handle_signal(signal.SIGINT)
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("number", "word_after_s", "reason", "code"),
    [
        (signal.SIGTERM, 1.0, NOTICE, None),
        (signal.SIGTERM, 99.0, NONE, "143"),
        (signal.SIGUSR1, 99.0, NONE, None),
        (signal.SIGUSR2, 1.0, NOTICE, None),
    ],
)
def test_a_signal_under_a_supervisor_needs_its_notice(
    tmp_path: Path,
    clock: Clock,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    word_after_s: float,
    reason: int,
    code: str | None,
) -> None:
    path, begin = tmp_path / "notice", clock.now
    monkeypatch.setattr(
        signals, "read_word", lambda file: "time limit" if clock.now - begin > word_after_s else ""
    )
    notices = Notices(path)
    if code:
        with pytest.raises(LeftError, match=code):
            notices._handle_signal(number)
        assert printed == ["SIGTERM without a notice: a peer has failed; ending"]
    else:
        notices._handle_signal(number)
    assert notices.reason == reason
    assert clock.now - begin == pytest.approx(min(word_after_s, 2.0), abs=0.1)


@pytest.mark.parametrize("has_notice", [False, True])
def test_a_supervisor_that_waits_for_a_disk_is_waited_for(
    tmp_path: Path,
    clock: Clock,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    has_notice: bool,
) -> None:
    """Its loop stands still, and with it its beat; else the worker would die without a save."""
    begin = clock.now

    def read(path: Path) -> dict[str, Any]:
        stands = clock.now < begin + 5.0
        source = {"source": "SIGTERM"} if has_notice and not stands else {}
        return {"beat": begin if stands else clock.now, **source}

    monkeypatch.setattr(signals, "_read_local", read)
    monkeypatch.setattr(signals, "read_word", lambda file: "")
    notices = Notices(tmp_path / "notice", tmp_path / "local")
    if has_notice:
        notices._handle_signal(signal.SIGTERM)
        assert notices.reason == NOTICE
    else:
        with pytest.raises(LeftError, match="143"):
            notices._handle_signal(signal.SIGTERM)
    assert clock.now - begin == pytest.approx(5.0, abs=0.1)


def test_signals_after_the_end_are_ignored(clock: Clock, printed: list[str]) -> None:
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    try:
        for supervised, then_exit, term in (
            (None, False, signal.SIG_DFL),
            (None, True, signal.SIG_IGN),
            (Path("/no"), False, signal.SIG_IGN),
        ):
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            notices = Notices(supervised)
            notices.end(then_exit)
            assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == term
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
            assert (signal.getsignal(signal.SIGINT) == signal.SIG_IGN) is (term == signal.SIG_IGN)
            assert notices._ended
        notices._handle_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert printed == []


def test_a_lesser_reason_does_not_replace_a_greater_one(tmp_path: Path) -> None:
    notices = Notices(None)
    notices._note_reason(DEADLINE, "a")
    notices._note_reason(CANCELLED, "b")
    notices._note_reason(DEADLINE, "c")
    assert (notices.reason, notices.source) == (DEADLINE, "a")
    notices.watch_for_cancel(tmp_path)
    notices._read_files()
    assert notices.reason == DEADLINE
    texts = ("[1]", "{}", '{"source": 5}', "x" * 200)
    assert [signals._source_of(text) for text in texts] == ["[1]", "notice", "5", "x" * 100]
    assert (signals.REASONS[CANCELLED], signals.REASONS[NOTICE]) == ("cancelled", "notice")


def test_a_forked_child_dies_of_signals_as_any_process() -> None:
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    woken_by = signal.set_wakeup_fd(writer.fileno())
    try:
        signal.signal(signal.SIGUSR1, signals._do_nothing)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signals._release_signals()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(woken_by)
        reader.close()
        writer.close()
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGUSR2, before[1])


@pytest.mark.parametrize("by_signal", [True, False])
def test_installed_notices_come_from_signals_and_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: list[str], by_signal: bool
) -> None:
    after_fork: list[Any] = []
    monkeypatch.setattr(
        os, "register_at_fork", lambda after_in_child: after_fork.append(after_in_child)
    )
    monkeypatch.setattr(signals, "POLL_S", 0.01)
    numbers = (*signals.SIGNALS, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGALRM, lambda *_: None)  # somebody else's
    notices = Notices(None if by_signal else tmp_path / "notice")
    woken_by = signal.set_wakeup_fd(-1)
    try:
        notices.install()
        if by_signal:
            os.kill(os.getpid(), signal.SIGALRM)
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            (tmp_path / "notice").write_text("preemption")
        wait_until(lambda: notices.reason == NOTICE, "the notice")
        assert notices.source == ("SIGUSR1" if by_signal else "preemption")
        assert after_fork == [signals._release_signals]
    finally:
        notices._ended = True
        for thread in threading.enumerate():
            if thread.name == "hpc-ddp notices":
                assert thread.daemon
                thread.join(60)
        signal.set_wakeup_fd(woken_by)
        for number, handler in before.items():
            signal.signal(number, handler)
        notices._reader.close()
        notices._writer.close()


class Thread:
    """A thread that is recorded, not started."""

    def __init__(self, noted: list[dict[str, Any]], **values: Any) -> None:
        self.noted, self.values = noted, values

    def start(self) -> None:
        self.noted.append(self.values)


def test_a_loader_worker_survives_signals_to_the_whole_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    masks: list[Any] = []
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *mask: masks.append(mask))
    threads: list[dict[str, Any]] = []
    monkeypatch.setattr(threading, "Thread", partial(Thread, threads))
    monkeypatch.setattr(subprocess.Popen, "terminate", subprocess.Popen.terminate)
    try:
        signals.ignore_notices()
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert masks == [(signal.SIG_BLOCK, {signal.SIGTERM})]
    obeys = {"target": signals._exit_at_sigterm_of, "args": (os.getppid(),), "daemon": True}
    assert threads == [obeys]


def test_a_loader_worker_obeys_its_parent_alone(
    monkeypatch: pytest.MonkeyPatch, printed: list[str]
) -> None:
    senders = [1, 5, 7, 5]
    monkeypatch.setattr(
        signal, "sigwaitinfo", lambda numbers: SimpleNamespace(si_pid=senders.pop(0))
    )
    with pytest.raises(LeftError, match="0"):
        signals._exit_at_sigterm_of(7)
    assert senders == [5]


def test_signals_are_taken_back_from_a_library() -> None:
    earlier = {number: signal.getsignal(number) for number in signals.SIGNALS}
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        Notices(None).take_signals()
        assert {signal.getsignal(number) for number in signals.SIGNALS} == {signals._do_nothing}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        Notices(None).take_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        Notices(None).end(then_exit=False)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
