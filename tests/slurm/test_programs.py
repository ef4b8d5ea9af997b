"""Public training programs, adopted, preempted on the cluster, and resumed.

    make programs SOURCES=folder

`folder` has a clone of each repository that `tests/programs` names.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from harness import Hpc, Job, in_one_go, use

from tests.programs import own_loops, trainers
from tests.programs.program import RESULT, Program

SOURCES = "HPC_DDP_PROGRAMS"
PROGRAMS = (*own_loops.PROGRAMS, *trainers.PROGRAMS)
TABLE = Path(__file__).parents[2] / "docs" / "results" / "programs.md"

pytestmark = pytest.mark.programs


def _submit(hpc: Hpc, program: Program, script: Path, result: Path) -> Job:
    words = [*program.shape, "--time", "10:00", "--env", f"{RESULT}={result}"]
    words += ["--env", f"PYTHONPATH={Path(os.environ[SOURCES]) / 'packages'}"]
    return hpc.submit(*words, script.name, *program.args, cwd=script.parent)


def _is_equal(one: object, other: object) -> bool:
    """Return whether two results are equal bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize("program", [pytest.param(it, id=it.name) for it in PROGRAMS])
def test_program(program: Program, hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    use(cluster)
    script, lines = program.lay_out(Path(os.environ[SOURCES]), tmp_path / "program")
    assert len(lines) <= program.limit, "\n".join(lines)
    whole, resumed = tmp_path / "undisturbed.pt", tmp_path / "preempted.pt"
    undisturbed = _submit(hpc, program, script, whole)
    assert undisturbed.end() == "COMPLETED", undisturbed.output()
    job = _submit(hpc, program, script, resumed)
    job.at_step(program.preempted_at)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")], job.output()
    assert in_one_go(job), job.output()
    is_equal = _is_equal(torch.load(whole), torch.load(resumed))
    assert is_equal or program.unequal_because
    stops, begins = (
        [event["step"] for event in job.events(kind)] for kind in ("stopped", "first_step")
    )
    print(f"{program.name}: {len(lines)} lines, stopped {stops}, began {begins}, {is_equal=}")
