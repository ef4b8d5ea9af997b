"""Events are written line by line, and read back from all writers."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core import file_io
from hpc_ddp.core.journal import line_reader
from hpc_ddp.core.journal.events import (
    Cancelled,
    Finished,
    JournalEvent,
    MetricsLine,
    Queued,
    step_of,
)
from hpc_ddp.core.journal.goodput import account
from hpc_ddp.core.journal.journal import (
    Journal,
    events_of,
    is_finished,
    last_event,
    node_seconds,
    read_briefly,
    read_events,
)
from tests.raw_events import raw, typed
from tests.waiting import LIMIT_S
from unit.core.journal.fakes import event_at
from unit.fakes import stop_clock
from unit.report.written_runs import make_run


def test_events_are_sorted_by_attempt_and_time(tmp_path: Path) -> None:
    Journal(tmp_path, "b", attempt=1).write(Cancelled())
    Journal(tmp_path, "a", attempt=0).write(Queued("7"))
    events = read_events(tmp_path)
    assert [event.event for event in events] == ["queued", "cancelled"]
    assert last_event(events, Queued, Finished) == events[0]
    assert last_event(events, Finished) is None


def test_a_torn_line_is_skipped_and_closed_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "a")
    journal.write(Queued("1"))
    with open(journal.path, "ab") as file:
        file.write(b'{"time": 1, "event": "torn", "att')
    journal.write(Queued("2"))
    assert [event.to_fields() for event in read_events(tmp_path)] == [
        {"job_id": "1"},
        {"job_id": "2"},
    ]


def test_lines_that_are_no_events_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'[]\n5\n{"event": "x"}\n\xff\xfe\n')
    assert read_events(tmp_path) == []


def test_a_disk_in_trouble_holds_up_only_the_thread_that_writes(tmp_path: Path) -> None:
    gate, us = threading.Event(), threading.current_thread()

    class Held(Journal):
        def _append(self, line: bytes) -> None:
            if threading.current_thread() is not us:
                assert gate.wait(LIMIT_S)
            super()._append(line)

    journal = Held(tmp_path, "a")
    for step in range(3):
        journal.write_later(raw("metrics", step=step))
    journal.drain(0.0)
    journal.write(Cancelled())  # by this thread
    assert [event.event for event in read_events(tmp_path)] == ["cancelled"]
    gate.set()
    journal.drain(LIMIT_S)
    assert len(read_events(tmp_path)) == 4


def test_a_drain_waits_for_delayed_events(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "a")
    for step in range(3):
        journal.write_later(raw("metrics", step=step))
    journal.drain(LIMIT_S)
    assert [step_of(event) for event in read_events(tmp_path)] == [0, 1, 2]
    journal = Journal(tmp_path / "a.jsonl" / "below", "b")
    journal.write_later(raw("metrics"))
    journal.drain(LIMIT_S)  # a line that can't be written is left out


def test_a_forked_process_has_a_thread_of_its_own(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "a")
    journal.write_later(Queued("1"))
    journal.drain(LIMIT_S)
    pid = os.fork()
    if pid == 0:
        journal.drain(LIMIT_S)  # waits for nothing
        journal.write_later(Cancelled())
        journal.drain(LIMIT_S)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert [event.event for event in read_events(tmp_path)] == ["queued", "cancelled"]


def test_a_failing_disk_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "below", "a")
    journal.write(raw("one"))
    journal.write(raw("two"))
    assert capsys.readouterr().err.count("can't write the journal") == 1


def test_a_brief_read_parses_only_the_last_metrics(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "rank-0", attempt=2)
    for step in (1, 2, 3):
        journal.write(raw("metrics", step=step, loss=0.5))
    journal.write(raw("stopped", step=3, reason="notice"))
    Journal(tmp_path, "batch").write(raw("started"))
    events = read_briefly(tmp_path)
    assert [event.event for event in events] == ["started", *["metrics"] * 3, "stopped"]
    metrics = [event for event in events if isinstance(event, MetricsLine)]
    assert [event.number("loss") for event in metrics] == [None, None, 0.5]
    assert [step_of(event) for event in events] == [None, 1, 2, 3, 3]
    assert [event.time for event in events] == [event.time for event in read_events(tmp_path)]
    assert all(event.attempt == 2 for event in events[1:])


@pytest.mark.parametrize(("more_bytes", "steps"), [(0, [None, 2]), (1, [1, None, 2])])
def test_a_long_curve_keeps_no_run_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more_bytes: int, steps: list[int | None]
) -> None:
    """Hundreds of values a line come to gigabytes in a run of weeks."""
    journal = Journal(tmp_path, "rank-0")
    journal.write(MetricsLine({"step": 1}))
    first_bytes = journal.path.stat().st_size
    journal.write(Cancelled())
    journal.write(MetricsLine({"step": 2}))
    size = journal.path.stat().st_size
    monkeypatch.setattr(line_reader, "CURVE_BYTES", size - first_bytes + more_bytes)
    assert [step_of(event) for event in events_of(journal.path)] == steps


def test_an_event_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal", "a", attempt=4)
    journal.write_surely(Queued("7"))
    journal.write(Cancelled())
    event, _ = read_events(journal.path.parent)
    assert event == Queued("7", time=event.time, attempt=4)
    assert abs(event.time - time.time()) < 60
    assert journal.path.read_bytes().count(b"\n") == 2


def test_a_run_that_was_moved_away_is_not_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Journal(tmp_path / "moved" / "journal", "a").write(raw("x"))
    assert not (tmp_path / "moved").exists()
    assert "can't write the journal" in capsys.readouterr().err


def test_an_important_event_is_retried_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = stop_clock(monkeypatch, file_io)
    (tmp_path / "file").touch()
    Journal(tmp_path / "file", "a").write_surely(raw("x"))
    assert sum(clock.slept) == 61  # a minute, and one more try
    assert capsys.readouterr().err.count("can't write the journal") == 1


@pytest.mark.parametrize(
    ("events", "finished"),
    [
        ([], False),
        ([event_at("finished")], True),
        ([event_at("finished"), event_at("verdict", cause="failed")], False),
        ([event_at("verdict", cause="finished"), event_at("started")], True),
        ([event_at("verdict", cause="preempted"), event_at("finished", 1.0, 1)], True),
        ([event_at("verdict", cause="failed"), event_at("finished", 1.0)], False),  # by two clocks
        ([event_at("started", nodes=["n1"]), event_at("finished", at_exit=True)], False),
        ([event_at("started", nodes=["n1"]), event_at("finished", within=True)], False),
        ([event_at("started"), event_at("finished", at_exit=True)], True),  # a plain start
        ([event_at("finished"), event_at("verdict", cause="superseded")], True),  # cut off
        ([event_at("verdict", cause="superseded")], False),
        ([event_at("finished"), event_at("verdict", 1.0, 1, cause="superseded")], True),
    ],
)
def test_a_run_is_finished_by_its_last_event(events: list[JournalEvent], finished: bool) -> None:
    assert is_finished(events) is finished


def test_node_seconds_are_counted_until_the_verdict() -> None:
    events = [
        event_at("submitted", 0.0),
        event_at("started", 10.0, nodes=["a", "b"]),
        event_at("metrics", 25.0),
        event_at("verdict", 20.0),
        event_at("rerun", 500.0),
        event_at("started", 30.0, 1, nodes=["a"]),
        event_at("metrics", 40.0, 1),
    ]
    assert node_seconds(events) == 2 * 10 + 10
    assert node_seconds(events, now=100.0) == 2 * 10 + 70
    assert node_seconds(events, now=35.0) == 2 * 10 + 10
    assert node_seconds([event_at("started", 10.0), *events[:1]]) == 0
    ended = [*events, event_at("verdict", 45.0, 1)]
    assert node_seconds(ended, now=100.0) == 2 * 10 + 15


def _event_of(time: float, event: str, attempt: int, **more: Any) -> JournalEvent:
    return typed(event, time, attempt, **more)


def test_each_attempt_counts_its_nodes_until_its_verdict() -> None:
    events = [
        _event_of(100, "queued", 0),
        _event_of(110, "started", 0, nodes=["a", "b"]),
        _event_of(120, "verdict", 0),
        _event_of(150, "submitted", 0, first_attempt=1),
        _event_of(200, "started", 1, nodes=["a"]),
        _event_of(205, "metrics", 1),
    ]
    assert node_seconds(events) == 25
    assert node_seconds(events, now=210) == 30
    assert node_seconds([]) == 0


def test_a_brief_read_has_the_same_events(tmp_path: Path) -> None:
    run = make_run(tmp_path, ended=True)
    with open(run.journal_folder / "rank-0.jsonl", "ab") as file:
        file.write(b'{"time": 1.0, "event": "metrics", "attempt": 0, "step": 9, "lo')  # torn
    events, brief = run.events(), read_briefly(run.journal_folder)
    assert [e.event for e in events] == [e.event for e in brief]
    assert account(events) == account(brief)
    assert last_event(events, MetricsLine) == last_event(brief, MetricsLine)
