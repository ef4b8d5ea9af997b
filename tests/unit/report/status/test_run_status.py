"""The status of a run follows its journal and Slurm's queue."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_ddp.core import process
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.stragglers import slow_rank
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue
from hpc_ddp.report.cancel import cancel
from hpc_ddp.report.status import run_table as overview
from hpc_ddp.report.status.run_status import has_ended, status_of
from hpc_ddp.slurm_text import QueuedJob
from tests.raw_events import raw
from unit.fakes import Slurm, squeue_rows
from unit.report.written_runs import RUNNING_JOB, make_run, write_event, write_step_times


def test_a_running_runs_status(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    status = status_of(run, Queue({"7": RUNNING_JOB}))
    assert (status.state, status.why, status.nodes) == ("running", "n[1-2]", 2)
    assert (status.step, status.total_steps, status.samples_per_s) == (400, 1000, 64.0)
    assert status.time_left_s == 3723
    assert status.eta_s == pytest.approx(150, abs=10)
    assert status.last_checkpoint_s == pytest.approx(50, abs=10)
    text = overview.runs_table([status])
    assert text.splitlines()[0].split() == list(overview.COLUMNS)
    assert "400/1000" in text
    unlimited = Queue({"7": QueuedJob("RUNNING", "None", "n1", "UNLIMITED")})
    assert status_of(run, unlimited).time_left_s is None


def test_an_attempt_that_still_starts_has_no_forecast(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_event(run, "batch", "started", 5, attempt=1, nodes=["n1", "n2"], job_id="7")
    status = status_of(run, Queue({"7": RUNNING_JOB}))
    assert (status.state, status.attempt, status.eta_s) == ("running", 1, None)


def test_steps_of_an_earlier_start_are_no_forecast(tmp_path: Path) -> None:
    run = make_run(tmp_path)  # at step 400, just now
    write_event(run, "batch", "started", -1, attempt=1, nodes=["n1", "n2"], job_id="7")
    write_event(run, "rank-0", "first_step", -2, attempt=1, step=391)
    assert status_of(run, Queue({"7": RUNNING_JOB})).eta_s is None


def test_why_a_run_waits_is_told_in_words(tmp_path: Path) -> None:
    queue = Queue({"7": QueuedJob("PENDING", "Priority", "", "1:00:00")})
    status = status_of(make_run(tmp_path), queue)
    assert (status.state, status.reason) == ("waiting", "Priority")
    assert status.why == "jobs of higher priority come first"
    assert (status.time_left_s, status.eta_s, status.slow) == (None, None, "")


def test_starts_that_came_to_nothing_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_json(run.vain_jobs, {"6": 0, "7": 2})  # job 6 was preempted
    status = status_of(run, Queue({"7": QueuedJob("PENDING", "Priority", "", "1:00:00")}))
    words = "2 starts came to nothing: its output says why; jobs of higher priority come first"
    assert (status.why, status.reason) == (words, "Priority")


def test_a_run_whose_job_can_not_be_asked_for_is_not_called_lost(tmp_path: Path) -> None:
    status = status_of(make_run(tmp_path), Queue(None))
    assert status.state == "unknown"
    assert status.why == "job 7 of a Slurm, which can't be asked from here"
    assert status_of(make_run(tmp_path / "2"), Queue({})).state == "lost"
    run = make_run(tmp_path / "3")  # it may be in the queue again
    write_event(run, "batch", "verdict", 1, cause="preempted", action="requeue", why="preempted")
    assert status_of(run, Queue(None)).state == "unknown"
    assert status_of(run, Queue({})).state == "stopped"
    write_event(run, "submit", "submitted", 250, backend="salloc")
    assert status_of(run, Queue(None)).state == "stopped"


def test_logs_are_followed_until_the_finished_runs_job_has_ended(
    slurm_commands: Slurm, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    row = f"7|7|RUNNING|None|n1|9:00|/|{run.script}\n"
    for answer in (row, row, ""):
        slurm_commands.answer("squeue", squeue_rows(answer))
    slurm_commands.answer("squeue", err="squeue: error: Invalid user", code=1)
    assert not has_ended(run)
    write_event(run, "rank-0", "finished", 0, step=1000)
    assert status_of(run, Queue({"7": RUNNING_JOB})).state == "finished"
    assert not has_ended(run)  # the script may print more, and the verdict follows
    assert has_ended(run)
    assert has_ended(run)  # without an answer of Slurm
    process_run = make_run(tmp_path / "2")
    write_event(process_run, "batch", "started", 0, attempt=1, **process.identity())
    write_event(process_run, "rank-0", "finished", 0, attempt=1, step=1000)
    assert not has_ended(process_run)


def test_a_slow_rank_is_named_only_when_it_is_slow_for_long(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for _ in range(2):
        write_step_times(run, [0.1, 0.11, 0.3, 0.1], [0.0] * 4)
    assert slow_rank(run.events()) is None
    write_step_times(run, [0.1, 0.3, 0.28, 0.1], [0.0] * 4)  # another one once
    assert str(slow_rank(run.events())).startswith("rank 2 on n2 is slow: 0.3 s a step of its own")
    status = status_of(run, Queue({"7": RUNNING_JOB}))
    assert status.slow == "rank 2 on n2 is slow: 0.3 s a step of its own, others 0.1 s"
    assert status.slow in overview.runs_table([status])
    write_event(
        run, "rank-0", "worker", 0, began=time.time(), called=time.time()
    )  # they were started again
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
