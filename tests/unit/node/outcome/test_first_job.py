"""Variables of Slurm's that a later job of a run takes over from its first one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue import first_job
from tests.raw_events import raw


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "train" / "20260101-000000-abcd").make()
    run.job_json.write_text(JobSpec("train.py", submit_dir="/home/me/proj").to_json())
    return run


@pytest.mark.parametrize(
    ("attempt", "fresh", "of_slurm", "restarts"),
    [(0, 0, "", None), (2, 0, "", "2"), (2, 0, "4", "4"), (3, 2, "", "1"), (2, 2, "", None)],
)
def test_starts_are_counted_over_all_jobs(
    run: RunFolder, attempt: int, fresh: int, of_slurm: str, restarts: str | None
) -> None:
    """Scripts resume where SLURM_RESTART_COUNT is above 0."""
    run.journal("submit").write(raw("fresh", first_attempt=fresh))
    for _ in range(attempt):
        run.claim_attempt({}, lambda info: False)
    starts = first_job.count_starts(run)
    values = first_job.variables(run, starts, {"SLURM_RESTART_COUNT": of_slurm})
    assert values.get("SLURM_RESTART_COUNT") == restarts
    assert values["HPC_DDP_SLURM_RESTARTS"] == (of_slurm or "0")
    again = first_job.variables(run, starts, values)
    assert again == values
    assert values["SLURM_SUBMIT_DIR"] == "/home/me/proj"


@pytest.mark.parametrize(
    ("array", "count", "least", "most", "step"),
    [("0-2", "3", "0", "2", "1"), ("1-9:4%1", "3", "1", "9", "4"), ("1,4,9", "3", "1", "9", None)],
)
def test_a_task_has_the_numbers_of_the_whole_array(
    run: RunFolder, array: str, count: str, least: str, most: str, step: str | None
) -> None:
    """Tasks share out their data by them, also one that goes on alone."""
    run.job_json.write_text(JobSpec("train.py", array=array).to_json())
    task = run.task(9 if "9" in array else 2).make()
    task.job_json.write_text(JobSpec("train.py", array="9").to_json())
    values = first_job.variables(task, 0, {"SLURM_ARRAY_TASK_COUNT": "1"})
    names = ("COUNT", "MIN", "MAX", "STEP")
    numbers = [values.get(f"SLURM_ARRAY_TASK_{name}") for name in names]
    assert numbers == [count, least, most, step]


def test_a_job_that_is_no_task_has_no_numbers_of_one(run: RunFolder) -> None:
    run.job_json.write_text(JobSpec("train.py", array="0-3").to_json())
    assert first_job.variables(run, 0, {}) == {"HPC_DDP_SLURM_RESTARTS": "0"}


def test_the_batch_script_is_answered_with_lines_for_bash(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPC_DDP_RUN", str(run.path))
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    run.claim_attempt({}, lambda info: False)
    assert first_job.main([]) == 0
    assert "export SLURM_RESTART_COUNT=1\n" in capsys.readouterr().out
    run.job_json.unlink()
    assert first_job.main([]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "damage",
    [{"HPC_DDP_RUN": ""}, {"SLURM_ARRAY_TASK_ID": "x"}, {"SLURM_RESTART_COUNT": "x"}],
)
def test_damage_is_left_to_batch_begin(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: dict[str, str],
) -> None:
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    for name, value in {"HPC_DDP_RUN": str(run.path), **damage}.items():
        monkeypatch.setenv(name, value)
    assert first_job.main([]) == 0
    assert capsys.readouterr().out == ""
