"""Runs are started by their back-end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.submission import backends
from unit.fakes import raise_disk_full
from unit.submission.fakes import prepare_run


@pytest.mark.parametrize("is_new", [True, False])
def test_a_full_disk_leaves_no_new_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    prepared = prepare_run(tmp_path)
    monkeypatch.setattr(backends, "write_script", raise_disk_full)
    with pytest.raises(OSError, match="No space left"):
        backends.start(replace(prepared, is_new=is_new))
    assert prepared.run.path.exists() is not is_new


@pytest.mark.parametrize("options", [{}, {"time": "0:30:00", "nodes": 2, "partition": "long"}])
def test_both_backends_ask_slurm_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """submitit has defaults of its own, such as a time limit of 5 minutes."""
    monkeypatch.setattr("submitit.SlurmExecutor.affinity", lambda *_: 1)
    prepared = replace(prepare_run(tmp_path), spec=JobSpec("train.py", **options))
    ours, theirs = (
        {line for line in backend.script(prepared).splitlines() if line.startswith("#SBATCH")}
        for backend in (backends.SlurmBackend(), backends.SubmititBackend())
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["%j", "a%Ab", "%t", "%a"])
def test_submitit_takes_no_path_that_it_would_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("submitit.SlurmExecutor.affinity", lambda *_: 1)
    (tmp_path / name).mkdir()
    (tmp_path / "100%u").mkdir()
    with pytest.raises(UsageError, match="in whose place submitit puts the job's id"):
        backends.SubmititBackend().script(prepare_run(tmp_path / name))
    assert backends.SubmititBackend().script(prepare_run(tmp_path / "100%u"))
    assert backends.SlurmBackend().script(prepare_run(tmp_path / name))


def test_the_submitit_task_looks_for_no_module_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colleagues may write there, and Python would take their random.py."""
    monkeypatch.setattr("submitit.SlurmExecutor.affinity", lambda *_: 1)
    text = backends.SubmititBackend().script(prepare_run(tmp_path))
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "/submitit/core/_submit.py" in line
    assert " -m " not in line
    # What modules and set-up lines have put there stays, behind the run's own library.
    assert "/lib${PYTHONPATH:+:$PYTHONPATH} " in line


def test_an_allocation_of_another_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "19")
    monkeypatch.setenv("SLURM_NNODES", "1")
    prepared = replace(prepare_run(tmp_path), spec=JobSpec("train.py", nodes=4))
    with pytest.raises(UsageError, match="nodes is 4, and the allocation has 1"):
        backends.AllocationBackend().start(prepared)


def test_a_job_in_an_allocation_has_nothing_of_the_step_that_its_shell_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_job = {"SLURM_JOB_ID": "19", "SLURM_JOB_NUM_NODES": "4", "SLURM_CONF": "/etc/x"}
    of_step = {"SLURM_NNODES": "1", "SLURM_STEP_ID": "0", "SLURM_CPU_BIND_LIST": "0x1"}
    for name, value in (of_job | of_step | {"SLURM_DISTRIBUTION": "cyclic"}).items():
        monkeypatch.setenv(name, value)
    prepared = prepare_run(tmp_path)
    output = tmp_path / "environment"
    prepared.run.script.write_text("env\n")
    with output.open("wb") as file:
        process = backends.AllocationBackend().start(prepared, file).process
        assert process is not None
        assert process.wait(60) == 0
    lines = [line for line in output.read_text().splitlines() if line.startswith("SLURM_")]
    assert sorted(lines) == ["SLURM_CONF=/etc/x", "SLURM_JOB_ID=19", "SLURM_JOB_NUM_NODES=4",
                             "SLURM_NNODES=4"]  # fmt: skip


def test_a_variable_that_a_job_leaves_out_is_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLACE", "here")
    env = {"FOO": "1", "BAR": "at $PLACE"}
    spec = JobSpec(script="a.py", python="python", env=env, without=("FOO",), expand=("PLACE",))
    assert backends._local_env(spec)["BAR"] == "at here"
