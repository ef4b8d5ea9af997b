"""Live runs are found in Slurm's queue; its commands are stand-ins."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue, describe_work, read_queue
from hpc_ddp.report.status.run_status import status_of
from hpc_ddp.slurm_text import QueuedJob
from tests.raw_events import raw
from unit.fakes import Slurm, squeue_rows
from unit.report.written_runs import make_run, write_event


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "run").make()
    run.journal("batch").write(raw("started", job_id="5", cluster="here"))
    return run


def test_the_queue_is_read(slurm_commands: Slurm) -> None:
    slurm_commands.answer("scontrol", "ClusterName = here\n")
    rows = "5|5|RUNNING|None|n1|9:00|/w|job.sbatch\n6|6|COMPLETED|None|n1|9:00|/w|over\n"
    slurm_commands.answer("squeue", squeue_rows(rows))
    queue = read_queue()
    job = QueuedJob("RUNNING", "None", "n1", "9:00", "/w/job.sbatch", "name")
    assert (queue.live, queue.cluster) == ({"5": job}, "here")


def test_a_controller_without_an_answer_gives_no_queue(
    slurm_commands: Slurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether that matters, the caller knows: a run that was played here has no job."""
    slurm_commands.answer("squeue", err="Access denied", code=1)
    queue = read_queue()
    assert queue.jobs is None
    assert "Access denied" in queue.problem
    monkeypatch.setenv("PATH", "/nowhere")
    queue = read_queue()
    assert (queue.jobs, queue.problem) == (None, "")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("jobs", "cluster", "work"),
    [
        ("5|5|RUNNING|None|n1|9:00|/w|a\n", "here", "job 5, running"),
        ("5|5|COMPLETED|None|n1|9:00|/w|a\n", "here", ""),
        ("6|6|RUNNING|None|n1|9:00|/|{script}\n", "here", "a job of its script"),
        ("6|6|COMPLETED|None|n1|9:00|/|{script}\n", "here", ""),
        ("6|6|RUNNING|None|n1|9:00|/|(null)\n", "here", ""),  # another run's: this one has a job
        ("", "there", "job 5 of cluster here, which can't be asked from here"),
    ],
)
@pytest.mark.parametrize("is_queued", [False, True])
def test_the_work_on_a_run_is_described(
    slurm_commands: Slurm, run: RunFolder, jobs: str, cluster: str, work: str, is_queued: bool
) -> None:
    if is_queued:  # on the other cluster it may be waiting still
        (run.journal_folder / "batch.jsonl").unlink()
        run.journal("submit").write(raw("queued", job_id="5", cluster="here"))
    slurm_commands.answer("scontrol", f"ClusterName = {cluster}\n")
    rows = shlex.quote(squeue_rows(jobs.format(script=run.script)))
    # Without a common database of accounting no other cluster can be asked.
    slurm_commands.answer_by("squeue", f'[[ "$*" != *--clusters* ]] && printf %s {rows}')
    assert str(describe_work(run, read_queue()) or "") == work


def test_a_start_that_failed_before_its_attempt_is_no_superseded_one(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_event(run, "batch", "verdict", 0, cause="superseded", action="none", why="")
    status = status_of(run, Queue({}))
    assert status.state == "lost"
    assert status.why == "its job was started again, and ended before the next attempt began"


def test_workers_that_formed_no_group_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    why = "WARNING: no process group was formed"
    write_event(run, "batch", "verdict", 0, cause="finished", action="none", why=why)
    status = status_of(run, Queue({}))
    assert (status.state, status.why) == ("finished", why)


def test_a_task_that_waits_after_a_requeue_is_not_lost(tmp_path: Path) -> None:
    """Its attempt ended as superseded: the requeue was Slurm's, or a person's."""
    sweep = make_run(tmp_path)
    task = RunFolder(sweep.path / "task-0").make()
    write_event(task, "batch", "started", 0, job_id="5", nodes=["n1"])
    write_event(task, "batch", "verdict", 0, cause="superseded", action="none", why="")
    waiting = QueuedJob("PENDING", "BeginTime", "", "9:00", "/w/job.sbatch", "name")
    assert status_of(task, Queue({"5": waiting})).state == "waiting"
