"""Names of options as sbatch and srun read them."""

from __future__ import annotations

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.slurm_options import SBATCH, SRUN, full_name, split_raw


@pytest.mark.parametrize(
    ("name", "names", "whole"),
    [
        ("part", SBATCH, "partition"),
        ("time", SBATCH, "time"),  # also a beginning
        ("tasks-per-node", SBATCH, "ntasks-per-node"),
        ("tasks-per-n", SRUN, "ntasks-per-node"),
        ("job", SBATCH, "job-name"),
        ("job", SRUN, "job"),  # or jobid
        ("container-image", SRUN, "container-image"),  # of a plugin
    ],
)
def test_an_option_has_one_name(name: str, names: str, whole: str) -> None:
    assert full_name(name, names) == whole


def test_the_beginning_of_several_is_refused() -> None:
    assert split_raw("--mem=4G", "sbatch", "--x") == ("mem", "4G")
    with pytest.raises(UsageError, match="--node is a beginning of --nodefile, --nodelist, --node"):
        split_raw("--node=4", "sbatch", "--x")
