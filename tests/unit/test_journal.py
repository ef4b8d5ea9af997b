from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.run.journal import Journal, last_event, read_events


def test_merges_writers_by_attempt_then_time(tmp_path: Path) -> None:
    Journal(tmp_path, "b", attempt=1).write("late")
    Journal(tmp_path, "a", attempt=0).write("early", step=3)
    events = read_events(tmp_path)
    assert [event["event"] for event in events] == ["early", "late"]
    assert last_event(events, "early", "never") == events[0]
    assert last_event(events, "never") is None


def test_a_torn_line_is_skipped_and_closed_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "a")
    journal.write("one")
    with open(journal.path, "ab") as file:
        file.write(b'{"time": 1, "event": "torn", "att')
    journal.write("two")
    assert [event["event"] for event in read_events(tmp_path)] == ["one", "two"]


def test_lines_that_are_no_events_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'[]\n5\n{"event": "x"}\n\xff\xfe\n')
    assert read_events(tmp_path) == []


def test_a_failing_disk_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "below", "a")
    journal.write("one")
    journal.write("two")
    assert capsys.readouterr().err.count("can't write the journal") == 1
