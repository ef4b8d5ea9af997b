"""Runs are selected, sorted and shown as a table."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue
from hpc_ddp.report.status import run_table as overview
from hpc_ddp.report.status.run_status import status_of
from tests.raw_events import raw
from unit.report.written_runs import RUNNING_JOB, make_run


def test_the_newest_and_the_live_ones_are_shown(tmp_path: Path, monkeypatch: Any) -> None:
    runs = [make_run(tmp_path, number, ended=number != 3) for number in range(30)]
    queue = Queue({"3": RUNNING_JOB})
    shown, older = overview.select_runs(tmp_path, queue, show_all=False)
    assert (len(shown), older) == (21, 9)
    assert shown[:2] == [runs[29], runs[28]]
    assert len(overview.select_runs(tmp_path, queue, show_all=True)[0]) == 30
    monkeypatch.setattr(overview, "read_queue", lambda: queue)
    table = overview.status_text(tmp_path, [], False, False)
    assert [line.split()[2] for line in table.splitlines()[1:4]] == ["3", "29", "28"]
    assert table.endswith("… 9 older: hpc-ddp status --all")
    assert len(json.loads(overview.status_text(tmp_path, [], False, True))) == 30


def test_a_narrow_terminal_loses_columns_not_lines(tmp_path: Path) -> None:
    row = status_of(make_run(tmp_path), Queue({"7": RUNNING_JOB}))
    widths = {}
    for width in (200, 120, 100, 80, 60, 40):
        lines = overview.runs_table([row], width).splitlines()
        assert len(lines) == 2
        assert all(len(line) <= width for line in lines)
        widths[width] = lines[0].split()
    assert set(widths[80]) < set(widths[120]) < set(widths[200])
    assert set(widths[40]) <= {"name", "state", "step", "left", "why"}
    assert "\033[32mrunning" in overview.runs_table([row], 120, colours=True)


def test_the_queue_is_read_once(tmp_path: Path, monkeypatch: Any) -> None:
    """One call serves any number of runs."""
    calls = []

    def queue() -> Queue:
        calls.append(1)
        return Queue({"7": RUNNING_JOB}, "")

    monkeypatch.setattr(overview, "read_queue", queue)
    for number in range(5, 30):
        make_run(tmp_path, number)
    table = overview.status_text(tmp_path, [], True, False)
    assert table.count("\n") == 25
    assert table.splitlines()[1].split()[2:4] == ["7", "running"]
    assert len(calls) == 1


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    """Deep nesting, a time that is none, a verdict without its parts, a folder for a file."""
    runs = []
    for name in ("1", "2"):
        run = RunFolder(tmp_path / "digits" / name).make()
        run.job_json.write_text(JobSpec("train.py").to_json())
        run.journal("batch").write(raw("finished", step=3))
        runs.append(run)
    with open(runs[0].journal_folder / "batch.jsonl", "a") as file:
        file.write("[" * 100_000 + "\n")
        file.write('{"time": NaN, "event": "started", "attempt": 1, "nodes": 5}\n')
        file.write('{"time": 1999999999, "event": "verdict", "attempt": 5}\n')
    assert [row.state for row in overview.read_statuses(tmp_path, runs, Queue({}))] == [
        "finished",
        "finished",
    ]
    (runs[0].journal_folder / "a.jsonl").mkdir()
    (tmp_path / f".status-{os.geteuid()}.json").unlink()
    assert [row.state for row in overview.read_statuses(tmp_path, runs, Queue({}))] == [
        "unreadable",
        "finished",
    ]


def test_an_array_whose_job_json_is_broken_is_not_finished(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "digits" / "1").make()
    run.job_json.write_text("{")
    run.journal("submit").write(raw("submitted"))
    task = RunFolder(run.path / "task-0").make()
    task.job_json.write_text("{")
    task.journal("batch").write(raw("finished", step=3))
    everything = overview.status_text(tmp_path, [], True, False)
    assert "1 tasks finished; job.json can't be read" in everything
    text = overview.status_text(tmp_path, ["digits"], False, False)
    assert "job.json can't be read" in text
