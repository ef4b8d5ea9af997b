"""The status of a run, from its journal and Slurm's queue."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fakes import Slurm, squeue_rows
from written_runs import RUNNING_JOB, make_run, write_event

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.journal.events import MetricsLine
from hpc_ddp.core.journal.goodput import account
from hpc_ddp.core.journal.journal import last_event, read_briefly
from hpc_ddp.core.journal.stragglers import slow_rank
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.liveness import Queue
from hpc_ddp.report.cancel import cancel
from hpc_ddp.report.status import run_table as overview
from hpc_ddp.report.status.run_status import status_of
from hpc_ddp.slurm_text import QueuedJob
from tests.raw_events import raw


def test_a_run_that_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    status = status_of(run, Queue({"7": RUNNING_JOB}))
    assert (status.state, status.why, status.nodes) == ("running", "n[1-2]", 2)
    assert (status.step, status.total_steps, status.samples_per_s) == (400, 1000, 64.0)
    assert status.time_left_s == 3723
    assert status.eta_s == pytest.approx(150, abs=10)
    assert status.last_checkpoint_s == pytest.approx(50, abs=10)
    text = overview.table([status])
    assert text.splitlines()[0].split() == list(overview.COLUMNS)
    assert "400/1000" in text
    unlimited = Queue({"7": QueuedJob("RUNNING", "None", "n1", "UNLIMITED")})
    assert status_of(run, unlimited).time_left_s is None


def test_why_a_run_waits_is_told_in_words(tmp_path: Path) -> None:
    queue = Queue({"7": QueuedJob("PENDING", "Priority", "", "1:00:00")})
    status = status_of(make_run(tmp_path), queue)
    assert (status.state, status.reason) == ("waiting", "Priority")
    assert status.why == "jobs of higher priority come first"
    assert (status.time_left_s, status.eta_s, status.slow) == (None, None, "")


def test_brief_reading_tells_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path, ended=True)
    with open(run.journal_folder / "rank-0.jsonl", "ab") as file:
        file.write(b'{"time": 1.0, "event": "metrics", "attempt": 0, "step": 9, "lo')  # torn
    events, brief = run.events(), read_briefly(run.journal_folder)
    assert [e.event for e in events] == [e.event for e in brief]
    assert account(events) == account(brief)
    assert last_event(events, MetricsLine) == last_event(brief, MetricsLine)


def _ranks(run: RunFolder, busy: list[float], data: list[float], **more: Any) -> None:
    slowest = busy.index(max(busy))
    fields = {"step": 9, "steps": 9, "step_s": 0.3, "slowest": slowest, "node": f"n{slowest}"}
    write_event(run, "rank-0", "ranks", 1, busy_s=busy, data_s=data, **{**fields, **more})


def test_a_slow_rank_is_named_only_when_it_is_slow_for_long(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for _ in range(2):
        _ranks(run, [0.1, 0.11, 0.3, 0.1], [0.0] * 4)
    assert slow_rank(run.events()) is None
    _ranks(run, [0.1, 0.3, 0.28, 0.1], [0.0] * 4)  # another one once
    assert str(slow_rank(run.events())).startswith("rank 2 on n2 is slow: 0.3 s a step of its own")
    status = status_of(run, Queue({"7": RUNNING_JOB}))
    assert status.slow == "rank 2 on n2 is slow: 0.3 s a step of its own, others 0.1 s"
    assert status.slow in overview.table([status])
    write_event(
        run, "rank-0", "worker", 0, began=time.time(), called=time.time()
    )  # they were started again
    assert slow_rank(run.events()) is None


def test_what_is_slow(tmp_path: Path) -> None:
    for busy, data, found in (
        ([0.1, 0.3], [0.0, 0.21], "waits for data"),
        ([0.1, 0.3], [0.0, 0.05], "is slow"),
        ([0.1, 0.12], [0.0, 0.0], ""),  # a little
        ([0.001, 0.002], [0.0, 0.0], ""),  # of steps of 300 ms that is nothing
        ([0.1, 0.1], [0.0, 0.0], ""),
    ):
        run = make_run(tmp_path / str(busy) / str(data))
        for _ in range(3):
            _ranks(run, busy, data)
        assert found in str(slow_rank(run.events()) or ""), busy
        assert bool(found) == (slow_rank(run.events()) is not None)


def test_damaged_ranks_name_nobody(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    damages: list[dict[str, Any]] = [
        {"busy_s": ["x"], "data_s": 3},
        {"step_s": None},
        {"busy_s": []},
    ]
    for damage in damages:
        fields = {"busy_s": [0.1, 0.3], "data_s": [0.0], "slowest": 1, "node": 7, "step_s": 0.3}
        write_event(run, "rank-0", "ranks", 0, **{**fields, **damage})
    assert slow_rank(run.events()) is None


def test_only_jobs_of_the_runs_script_are_cancelled(slurm_commands: Slurm, tmp_path: Path) -> None:
    """A journal may name a job whose number is another job's by now."""
    run = RunFolder(tmp_path / "train" / "20260101-000000-abcd").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    journal = run.journal("submit")
    journal.write(raw("submitted", backend="slurm"))
    for job_id in ("14", "15", "16"):
        journal.write(raw("queued", job_id=job_id))
    rows = (
        f"14|14|RUNNING|None|n1|9:00|/|{run.script}\n15|15|RUNNING|None|n1|9:00|/|mine.sh\n"
        f"16|16|COMPLETED|None|n1|9:00|/|{run.script}\n"
    )
    slurm_commands.answer("squeue", squeue_rows(rows))
    slurm_commands.answer("scancel", "")
    slurm_commands.answer("scontrol", "   JobState=RUNNING\n   StdOut=/home/me/mine.out\n")
    with pytest.raises(HpcDdpError, match="not cancelled: job 15 is live"):
        cancel(run)
    (call,) = slurm_commands.calls("scancel")
    assert call[-1:] == ["14"]
    assert read_json(run.cancelled) == {"jobs": ["14", "15", "16"]}
