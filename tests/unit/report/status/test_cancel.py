"""What `hpc-ddp cancel` ends, and what it names as live; Slurm's commands are stand-ins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_ddp import slurm
from hpc_ddp.core import process
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report import cancel as cancel_module
from hpc_ddp.report.cancel import cancel
from hpc_ddp.report.status.run_status import has_ended
from tests.raw_events import raw
from unit.fakes import Clock, Slurm, squeue_rows, stop_clock

HERE = "ClusterName = here\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "20260101-000000-abcd").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    return run


def _shown(output: object) -> str:
    return f"   JobState=RUNNING Reason=None\n   StdOut={output}\n"


@pytest.mark.parametrize("script", ["(null)", "mine.sbatch", "/home/me/a|b/other"])
@pytest.mark.parametrize("is_journaled", [True, False])
def test_a_job_that_prints_into_the_run_is_cancelled(
    slurm_commands: Slurm, run: RunFolder, script: str, is_journaled: bool
) -> None:
    """One that came through a pipe, a copy of the script; also before it has begun."""
    if is_journaled:
        run.journal("batch").write(raw("started", job_id="4", cluster="here"))
    slurm_commands.answer("squeue", squeue_rows(f"4|4|RUNNING|None|n1|9:00|/|{script}\n"))
    slurm_commands.answer("squeue", squeue_rows(f"4|4|COMPLETING|None|n1|9:00|/|{script}\n"))
    slurm_commands.answer_by(
        "scontrol", f"[ $2 = config ] && printf '{HERE}' || printf '{_shown(run.slurm_out)}'"
    )
    slurm_commands.answer("scancel")
    cancel(run)
    assert slurm_commands.calls("scancel") == [["4"]]


def test_an_array_is_cancelled_with_the_job_of_a_task_that_goes_on_alone(
    slurm_commands: Slurm, run: RunFolder
) -> None:
    """The task's own script is no other run's, also before its job has begun."""
    task = run.task(0).make()
    task.job_json.write_text(JobSpec("train.py").to_json())
    task.script.touch()
    run.script.touch()
    run.journal("submit").write(raw("queued", job_id="4"))
    task.journal("submit").write(raw("queued", job_id="5"))
    row = f"5|5|RUNNING|None|n1|9:00|/|{task.script}\n"
    slurm_commands.answer("squeue", squeue_rows(row))
    slurm_commands.answer("squeue")
    slurm_commands.answer("scancel")
    cancel(run)
    assert slurm_commands.calls("scancel") == [["5"]]


def test_jobs_of_other_runs_of_the_same_script_are_not_asked_for(
    slurm_commands: Slurm, run: RunFolder
) -> None:
    """A user has a thousand of them; one without a run, which Slurm has just forgotten, is none."""
    run.script.touch()
    others = [RunFolder(run.path.with_name(f"other-{i}")).make() for i in range(3)]
    for other in others:
        other.job_json.write_text(JobSpec("train.py").to_json())
        other.script.touch()
    scripts = [*(other.script for other in others), "(null)", run.script]
    rows = [f"{i}|{i}|PENDING|None||9:00|/|{path}\n" for i, path in enumerate(scripts, 1)]
    slurm_commands.answer("squeue", squeue_rows("".join(rows)))
    slurm_commands.answer("squeue", squeue_rows(rows[0]))
    slurm_commands.answer("scontrol", err="Invalid job id specified", code=1)
    slurm_commands.answer("scancel")
    cancel(run)
    assert slurm_commands.calls("scontrol") == [["show", "job", "4"]]
    assert slurm_commands.calls("scancel") == [["5"]]


def test_a_controller_that_is_silent_at_first_is_asked_again(
    slurm_commands: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is marked by then: its job has to be cancelled, too."""
    stop_clock(monkeypatch, slurm)
    run.script.touch()
    run.journal("submit").write(raw("queued", job_id="4"))
    slurm_commands.answer("squeue", err="slurm_load_jobs error: Socket timed out", code=1)
    slurm_commands.answer("squeue", squeue_rows(f"4|4|RUNNING|None|n1|9:00|/|{run.script}\n"))
    slurm_commands.answer("squeue")
    slurm_commands.answer("scancel")
    cancel(run)
    assert slurm_commands.calls("scancel") == [["4"]]


def test_the_job_of_another_task_is_no_job_of_a_task(slurm_commands: Slurm, run: RunFolder) -> None:
    for task in (run.task(0).make(), run.task(1).make()):
        task.job_json.write_text(JobSpec("train.py").to_json())
        task.script.touch()
    run.task(0).journal("submit").write(raw("queued", job_id="5"))
    row = f"5|5|RUNNING|None|n1|9:00|/|{run.task(1).script}\n"
    slurm_commands.answer("squeue", squeue_rows(row))
    slurm_commands.answer("scontrol", HERE)
    cancel(run.task(0))
    assert slurm_commands.calls("scancel") == []


def test_a_live_job_that_is_not_cancelled_is_named(slurm_commands: Slurm, run: RunFolder) -> None:
    run.journal("batch").write(raw("started", job_id="4"))
    slurm_commands.answer("squeue", squeue_rows("4|4|RUNNING|None|n1|9:00|/|mine.sh\n"))
    slurm_commands.answer("scontrol", _shown("/home/me/mine.out"))
    with pytest.raises(HpcDdpError, match="not cancelled: job 4 is live, and perhaps not of this"):
        cancel(run)
    assert slurm_commands.calls("scancel") == []


def test_a_job_of_another_cluster_is_cancelled_there_or_named(
    slurm_commands: Slurm, run: RunFolder
) -> None:
    run.journal("submit").write(raw("queued", job_id="4", cluster="there"))
    own = squeue_rows("4|4|RUNNING|None|n1|9:00|/|mine.sh\n")
    slurm_commands.answer("squeue", own)
    slurm_commands.answer("squeue", err="'there' can't be reached now", code=1)
    slurm_commands.answer("scontrol", HERE)
    with pytest.raises(HpcDdpError, match="job 4 of cluster there, which can't be asked"):
        cancel(run)
    assert slurm_commands.calls("scancel") == []
    slurm_commands.answer("squeue", own)
    slurm_commands.answer("squeue", squeue_rows(f"4|4|RUNNING|None|n1|9:00|/|{run.script}\n"))
    slurm_commands.answer("squeue", own)
    slurm_commands.answer("squeue")
    slurm_commands.answer("scancel")
    cancel(run)
    assert slurm_commands.calls("squeue")[-1][0] == "--clusters=there"
    assert slurm_commands.calls("scancel") == [["--clusters=there", "4"]]
    assert read_json(run.cancelled) == {"jobs": ["4;there"]}


def test_a_disk_that_takes_no_mark_keeps_no_job_alive(
    slurm_commands: Slurm,
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run.journal("submit").write(raw("queued", job_id="4"))
    slurm_commands.answer("squeue", squeue_rows(f"4|4|RUNNING|None|n1|9:00|/|{run.script}\n"))
    slurm_commands.answer("squeue")
    slurm_commands.answer("scontrol")
    slurm_commands.answer("scancel")

    def refuse(*_: object) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(cancel_module, "write_json", refuse)
    cancel(run)
    assert slurm_commands.calls("scontrol") == [["update", "JobId=4", "Requeue=0"]]
    assert slurm_commands.calls("scancel") == [["4"]]
    assert "can't be marked as cancelled: Read-only file system" in capsys.readouterr().err


def test_a_job_that_runs_on_after_scancel_is_not_called_cancelled(
    slurm_commands: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.journal("submit").write(raw("queued", job_id="4"))
    slurm_commands.answer("squeue", squeue_rows(f"4|4|RUNNING|None|n1|9:00|/|{run.script}\n"))
    slurm_commands.answer("scancel")
    monkeypatch.setattr(cancel_module, "time", Clock())
    with pytest.raises(HpcDdpError, match="not cancelled: job 4, running after scancel"):
        cancel(run)


def test_a_finished_run_is_cancelled_while_its_script_goes_on(
    slurm_commands: Slurm, run: RunFolder
) -> None:
    run.journal("submit").write(raw("queued", job_id="4"))
    run.journal("rank-0").write(raw("finished", step=9))
    row = f"4|4|RUNNING|None|n1|9:00|/|{run.script}\n"
    for answer in (row, row, ""):
        slurm_commands.answer("squeue", squeue_rows(answer))
    slurm_commands.answer("scancel")
    cancel(run)
    assert slurm_commands.calls("scancel") == [["4"]]
    assert run.finished()
    assert not run.cancelled.exists()
    with pytest.raises(UsageError, match="is finished"):
        cancel(run)
    assert len(slurm_commands.calls("scancel")) == 1


def test_an_array_of_finished_tasks_is_not_cancelled(slurm_commands: Slurm, run: RunFolder) -> None:
    """It stayed "cancelled" for good."""
    run.job_json.write_text(JobSpec("t.py", array="0-1").to_json())
    run.journal("submit").write(raw("queued", job_id="4"))
    slurm_commands.answer("squeue", squeue_rows(""))
    for index in (0, 1):
        run.task(index).make().journal("rank-0").write(raw("finished", step=9))
    with pytest.raises(UsageError, match="is finished"):
        cancel(run)
    assert not run.cancelled.exists()


@pytest.mark.parametrize("kind", ["a plain start", "an allocation", "with a verdict"])
def test_other_work_than_a_finished_runs_is_left_alone(
    slurm_commands: Slurm, run: RunFolder, kind: str
) -> None:
    """A process or an allocation goes on with the next run."""
    backend = {"a plain start": "local", "an allocation": "salloc"}.get(kind, "slurm")
    holder = process.identity() if backend == "local" else {"host": "n1", "job_id": "4"}
    run.journal("submit").write(raw("submitted", backend=backend))
    run.journal("batch").write(raw("started", backend=backend, **holder))
    run.journal("rank-0").write(raw("finished", step=9))
    if kind == "with a verdict":
        run.journal("batch").write(raw("verdict", cause="finished", action="none", why=""))
    slurm_commands.answer("squeue", squeue_rows(f"4|4|RUNNING|None|n1|9:00|/|{run.script}\n"))
    with pytest.raises(UsageError, match="is finished"):
        cancel(run)
    assert slurm_commands.calls("scancel") == []
    assert has_ended(run)


@pytest.mark.parametrize("action", ["requeue", "none", ""])
def test_the_allocation_of_a_stopped_run_goes_on(
    slurm_commands: Slurm, run: RunFolder, action: str
) -> None:
    """After a notice its verdict is a requeue, which an allocation leaves to the user."""
    has_stopped = bool(action)
    run.journal("submit").write(raw("submitted", backend="salloc"))
    run.journal("batch").write(raw("started", backend="salloc", job_id="4"))
    if has_stopped:
        run.journal("batch").write(raw("verdict", cause="notice", action=action, why=""))
    slurm_commands.answer("squeue", squeue_rows("4|4|RUNNING|None|n1|9:00|/|(null)\n"))
    slurm_commands.answer("squeue")
    slurm_commands.answer("scontrol", HERE)
    slurm_commands.answer("scancel")
    cancel(run)
    assert slurm_commands.calls("scancel") == ([] if has_stopped else [["4"]])
    assert run.cancelled.exists()


def test_a_process_on_another_machine_is_not_called_cancelled(run: RunFolder) -> None:
    run.journal("local").write(raw("started", backend="local", host="elsewhere", pid=1, began="1"))
    with pytest.raises(HpcDdpError, match="not cancelled: process 1 on elsewhere, which can't be"):
        cancel(run)
