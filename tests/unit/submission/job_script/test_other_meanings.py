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


@pytest.mark.parametrize(
    ("line", "args"),
    [
        ("srun bash -c 'python train.py $0 \"${0}\" $1' A B", ["A", "A", "B"]),
        ("srun bash -c 'python train.py $0'", ["bash"]),
        ("srun sh -c 'python train.py $0 $1' _ x", ["_", "x"]),
    ],
)
def test_the_name_of_a_shell_is_the_word_behind_its_text(line: str, args: list[str]) -> None:
    assert of_lines(line).settings()["args"] == args


def test_a_clean_up_line_finds_the_script_by_its_name() -> None:
    lines = ('f() { cp "${BASH_SOURCE%/*}/a" b; }', "srun python train.py", "f")
    copies = ('cp "$BASH_SOURCE" c', "cp ${BASH_SOURCE[0]} d", 'cp "$0" e')
    assert of_lines(*lines, *copies).settings()["teardown"] == [
        'f() { cp "${0%/*}/a" b; }', "f", 'cp "$0" c', "cp ${0} d", 'cp "$0" e',
    ]  # fmt: skip
    # The batch script has BASH_SOURCE itself.
    setup = of_lines('cp "$BASH_SOURCE" c', "srun python train.py").settings()["setup"]
    assert setup == ['cp "$BASH_SOURCE" c']
