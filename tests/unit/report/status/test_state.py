"""Live runs are found in Slurm's queue; its commands are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.status.state import describe_work, read_queue
from hpc_ddp.slurm_text import QueuedJob
from tests.raw_events import raw
from unit.fakes import Slurm


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "run").make()
    run.journal("batch").write(raw("started", job_id="5", cluster="here"))
    return run


def test_the_queue_is_read(slurm_commands: Slurm) -> None:
    slurm_commands.answer("scontrol", "ClusterName = here\n")
    rows = "5|5|RUNNING|None|n1|9:00|/w|job.sbatch\n6|6|COMPLETED|None|n1|9:00|/w|over\n"
    slurm_commands.answer("squeue", rows)
    queue = read_queue()
    assert queue
    assert queue.jobs["5"] == QueuedJob("RUNNING", "None", "n1", "9:00", "/w/job.sbatch")
    assert (queue.scripts, queue.cluster) == ({"/w/job.sbatch"}, "here")


def test_a_controller_without_an_answer_gives_no_queue(
    slurm_commands: Slurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_commands.answer("scontrol", err="Access denied", code=1)
    assert read_queue() is None
    assert "Access denied; runs that have a job are left alone" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert read_queue() is None
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
    slurm_commands.answer("squeue", jobs.format(script=run.script))
    assert describe_work(run, read_queue()) == work
