from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hpc_ddp.core.journal.events import Cancelled, Finished, Queued, step_of
from hpc_ddp.core.journal.journal import Journal, last_event, read_events
from tests.raw_events import raw
from tests.waiting import LIMIT_S


def test_merges_writers_by_attempt_then_time(tmp_path: Path) -> None:
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


def test_what_is_written_later_is_there_after_a_drain(tmp_path: Path) -> None:
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


def test_a_failing_disk_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "below", "a")
    journal.write(raw("one"))
    journal.write(raw("two"))
    assert capsys.readouterr().err.count("can't write the journal") == 1
