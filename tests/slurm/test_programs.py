"""Public training programs, adopted, preempted on the cluster, and resumed.

    make programs SOURCES=folder

`folder` has a clone of each repository that `tests/programs` names, and what they import.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from harness import REPO, Hpc, Job, in_one_go, use

from tests.programs import own_loops, trainers
from tests.programs.program import PROGRAMS_FOLDER, RESULT, Program

SOURCES = Path(os.environ[PROGRAMS_FOLDER])
PROGRAMS = (*own_loops.PROGRAMS, *trainers.PROGRAMS)
PAGE = REPO / "docs" / "results" / "programs.md"
HEAD = """\
# Public programs

Written by `make programs` ([testing.md](../testing.md)). Each program is adopted by the edits in
`tests/programs`, run undisturbed, and run again with a preemption, on the Slurm cluster of the
tests. Lines are those that the adoption adds or changes; deleted ones are not counted. Weights are
compared bit for bit.

| program | lines | stopped at step | went on at | final weights |
|---|---|---|---|---|
"""


def _submit(hpc: Hpc, program: Program, script: Path, result: Path) -> Job:
    words = [*program.shape, "--time", "20:00", "--env", f"{RESULT}={result}"]
    env = {"PYTHONPATH": f"{REPO}:{SOURCES / 'packages'}", "HF_HUB_OFFLINE": "1"}
    words += [script.name, *program.args.split()]
    return hpc.submit(*words, cwd=script.parent, env=env)


def _result(job: Job, path: Path) -> object:
    """Return what the program has written, or all that the last checkpoint has."""
    return torch.load(path) if path.exists() else job.weights(prefix="")


def _is_equal(one: object, other: object) -> bool:
    """Return whether two results are equal bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    return one == other


def _record(program: Program, lines: int, job: Job, is_equal: bool) -> None:
    """Write a program's row into the page of results, which keeps those of the others."""
    rows = dict(re.findall(r"^\| ([^|]+) (\|.*)$", PAGE.read_text() if PAGE.exists() else "", re.M))
    (stopped,), first = job.events("stopped"), job.event("first_step", attempt=1)["step"]
    verdict = "equal" if is_equal else f"not equal: {program.unequal_because}"
    link = f"[{program.name}](https://github.com/{program.repository}/blob/{program.commit}/{program.script})"
    rows[link] = f"| {lines} | {stopped['step']} | {first} | {verdict} |"
    table = [f"| {name} {rows[name]}\n" for name in sorted(rows) if name.startswith("[")]
    PAGE.write_text(HEAD + "".join(table))


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_program(program: Program, hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    use(cluster)
    script, lines = program.lay_out(SOURCES, tmp_path / "program")
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
    is_equal = _is_equal(_result(undisturbed, whole), _result(job, resumed))
    assert is_equal or program.unequal_because
    _record(program, len(lines), job, is_equal)
