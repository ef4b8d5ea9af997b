"""Variables of Slurm's that a later job of a run takes over from its first one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue import kept_variables
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
    starts = kept_variables.count_starts(run)
    values = kept_variables.variables(run, starts, {"SLURM_RESTART_COUNT": of_slurm})
    assert values.get("SLURM_RESTART_COUNT") == restarts
    assert values["HPC_DDP_SLURM_RESTARTS"] == (of_slurm or "0")
    again = kept_variables.variables(run, starts, values)
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
    values = kept_variables.variables(task, 0, {"SLURM_ARRAY_TASK_COUNT": "1"})
    names = ("COUNT", "MIN", "MAX", "STEP")
    numbers = [values.get(f"SLURM_ARRAY_TASK_{name}") for name in names]
    assert numbers == [count, least, most, step]


def test_a_job_that_is_no_task_has_no_numbers_of_one(run: RunFolder) -> None:
    run.job_json.write_text(JobSpec("train.py", array="0-3").to_json())
    values = {"HPC_DDP_SLURM_RESTARTS": "0", "HPC_DDP_FIRST_START": "yes"}
    assert kept_variables.variables(run, 0, {}) == values


@pytest.mark.parametrize(
    ("attempts", "fresh", "is_first"), [(0, None, True), (1, None, False), (1, 1, False)]
)
def test_set_up_lines_may_delete_old_results_in_a_first_start_alone(
    run: RunFolder, attempts: int, fresh: int | None, is_first: bool
) -> None:
    """By the presence of this variable; a line by the absence of a file deleted the checkpoints of
    a run whose disk was away for a moment."""
    if fresh:
        run.journal("submit").write(raw("fresh", first_attempt=fresh))
    for _ in range(attempts):
        run.claim_attempt({}, lambda info: False)
    values = kept_variables.variables(run, kept_variables.count_starts(run), {})
    assert (values.get("HPC_DDP_FIRST_START") == "yes") is is_first
