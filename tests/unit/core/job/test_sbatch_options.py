"""Raw options of sbatch with which a job would not be what hpc-ddp takes it for."""

from __future__ import annotations

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec


@pytest.mark.parametrize(
    "option",
    ["--array=0-2", "--ar=1", "--test-only", "--wait", "--wrap=id", "--no-kill", "--time-min=5"],
)
def test_what_makes_another_job_of_it_is_refused(option: str) -> None:
    name = option.partition("=")[0].replace("--ar", "--array").replace("arrayray", "array")
    with pytest.raises(UsageError, match=f"sbatch option {name} "):
        JobSpec("t.py", sbatch=(option,))


@pytest.mark.parametrize("option", ["--hold", "--ho", "--begin=now+1hour", "--beg=tomorrow"])
def test_a_chain_is_not_held_up_at_each_of_its_jobs(option: str) -> None:
    with pytest.raises(UsageError, match="would hold up each job of the chain"):
        JobSpec("t.py", sbatch=(option,), continue_by="resubmit")
    JobSpec("t.py", sbatch=(option,))


def test_others_are_taken() -> None:
    JobSpec("t.py", sbatch=("--wait-all-nodes=1", "--hint=nomultithread", "--account=x"))
