"""Submits to a cluster that sbatch is sent to, and refused ones; Slurm's commands are stand-ins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import asking_env
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.events import Queued
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission import attach_command, backends
from hpc_ddp.submission.plan import PreparedRun
from unit.fakes import Slurm, stop_clock


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedRun:
    monkeypatch.setattr(backends, "write_script", lambda prepared: "")
    run = RunFolder(tmp_path / "train" / "20260101-000000-abcd").make()
    return PreparedRun(JobSpec("train.py"), run, tmp_path, tmp_path / "train.py", is_new=True)


@pytest.mark.parametrize(("printed", "cluster"), [("31;other\n", "other"), ("31\n", "here")])
def test_the_cluster_that_has_the_job_is_journaled(
    slurm_commands: Slurm, prepared: PreparedRun, printed: str, cluster: str
) -> None:
    slurm_commands.answer("sbatch", printed)
    slurm_commands.answer("scontrol", "ClusterName = here\n")
    assert backends.start(prepared).job == JobRef("31", cluster)
    queued = last_event(prepared.run.events(), Queued)
    assert queued
    assert (queued.job_id, queued.cluster) == ("31", cluster)


def test_a_job_of_another_cluster_is_looked_for_and_asked_for_there(
    slurm_commands: Slurm, prepared: PreparedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_clock(monkeypatch, slurm)
    prepared.run.script.write_text("#SBATCH --clusters=other\n")
    slurm_commands.answer("sbatch", err="Socket timed out", code=1)
    slurm_commands.answer("squeue", f"31\x1fN/A\x1f{prepared.run.script}\n")
    job = slurm.sbatch(prepared.run.script, {})
    assert job == JobRef("31", "other")
    assert slurm_commands.calls("squeue")[0][-1] == "--clusters=other"
    slurm_commands.answer("scontrol", "ClusterName = here\n")
    slurm.show_job(job)
    assert slurm_commands.calls("scontrol")[-1] == ["--clusters=other", "show", "job", "31"]


def test_a_step_beside_a_worker_of_another_cluster_is_started_there(
    slurm_commands: Slurm, prepared: PreparedRun
) -> None:
    run = prepared.run
    run.job_json.write_text(prepared.spec.to_json())
    attempt = run.attempt(0)
    (attempt.path / "n1").mkdir(parents=True)
    (attempt.path / "n1" / "rank-0.pid").write_text("1")
    (attempt.path / "attempt.json").write_text(json.dumps({"job_id": "31", "cluster": "other"}))
    slurm_commands.answer("scontrol", "ClusterName = here\n")
    slurm_commands.answer("scontrol", "   JobState=RUNNING Reason=None\n")
    words = attach_command.make_command(run, None, None, ["stacks"], False)
    assert words[:3] == ["srun", "--clusters=other", "--jobid=31"]


def test_a_chain_stays_on_its_cluster(slurm_commands: Slurm, prepared: PreparedRun) -> None:
    prepared.run.script.write_text("#SBATCH --clusters=other,here\n")
    slurm_commands.answer("sbatch", "32;here\n")
    slurm.sbatch(prepared.run.script, {}, cluster="here")
    assert "--clusters=here" in slurm_commands.calls("sbatch")[0]


def test_inside_a_job_its_own_cluster_is_asked() -> None:
    assert "SLURM_CLUSTERS" not in asking_env({"SLURM_CLUSTERS": "a", "SLURM_JOB_ID": "1"})
    assert "SLURM_CLUSTERS" not in asking_env({"SLURM_CLUSTERS": "a,b"})
    assert asking_env({"SLURM_CLUSTERS": "a"})["SLURM_CLUSTERS"] == "a"


def test_jobs_in_hidden_partitions_are_seen() -> None:
    env = asking_env({"SQUEUE_PARTITION": "low"})
    assert env["SQUEUE_ALL"] == env["SINFO_ALL"] == env["SCONTROL_ALL"] == "1"


@pytest.mark.parametrize(
    "name",
    ["SQUEUE_PARTITION", "SCANCEL_STATE", "SCONTROL_FEDERATION", "SACCT_LOCAL", "SINFO_STATE"],
)
def test_options_of_a_profile_hide_no_job(
    slurm_commands: Slurm, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Slurm's commands take such a variable for an option, and a live job would count as lost."""
    monkeypatch.setenv(name, "high")
    slurm_commands.answer_by("squeue", f'printf %s "${name}"')
    slurm_commands.answer_by("scancel", f'[ -z "${name}" ]')
    assert slurm.list_jobs() == {}
    slurm.cancel(["7"])
    assert name not in asking_env({name: "high"})


def test_a_start_ends_an_earlier_cancel_of_its_tasks(
    slurm_commands: Slurm, prepared: PreparedRun
) -> None:
    """A preemption before the first attempt would find the mark, and refuse the task."""
    tasks = [RunFolder(prepared.run.path / f"task-{index}").make() for index in range(3)]
    for part in (prepared.run, *tasks):
        part.cancelled.write_text("{}")
        part.vain_jobs.write_text('{"7": 2}')
    slurm_commands.answer("sbatch", "31;other\n")
    backends.start(replace(prepared, spec=JobSpec("train.py", array="0,2")))
    assert [task.cancelled.exists() for task in tasks] == [False, True, False]
    assert [task.vain_jobs.exists() for task in tasks] == [False, True, False]
    assert not prepared.run.cancelled.exists()


def test_a_refused_submit_leaves_no_folder_of_its_name(
    slurm_commands: Slurm, prepared: PreparedRun
) -> None:
    slurm_commands.answer("sbatch", err="Invalid partition name", code=1)
    with pytest.raises(HpcDdpError, match="Invalid partition"):
        backends.start(prepared)
    assert not prepared.run.path.parent.exists()
    assert prepared.run.root.exists()
