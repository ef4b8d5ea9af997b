"""Lines of a job script that would mean something else in the new job; the report says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.submission.job_script.conversion import TAKEN, Conversion
from hpc_ddp.submission.job_script.convert import convert


def of_lines(*lines: str, folder: Path = Path("/w"), first: str = "#!/bin/bash") -> Conversion:
    return convert("\n".join((first, *lines)) + "\n", folder, folder, name="job.sbatch")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--distribution=block:block", "--distribution=block:block"),
        ("-m block:cyclic", "--distribution=block:cyclic"),
        ("-m '*:fcyclic'", "--distribution=*:fcyclic"),
        ("-m block", ""),
        ("-m cyclic:block", ""),
        ("--distribution=plane=4", ""),
    ],
)
def test_a_distribution_of_the_step_is_taken_over_for_a_nodes_cpus(
    option: str, expected: str
) -> None:
    result = of_lines("#SBATCH -N 2 --ntasks-per-node=4", f"srun {option} \\", " python train.py")
    assert "".join(result.settings().get("srun", [])) == expected
    assert result.group(3)[0] == TAKEN
    assert result.group(3)[1].endswith("hpc-ddp sets srun --distribution") == (not expected)
