"""Each job of jobs/ on two nodes, preempted once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO, TWO_BY_TWO, Hpc, in_one_go

# Arguments for some ten seconds of steps on four ranks, and what is said at the end.
JOBS = {
    "linear_regression": ("--epochs 400", "y = "),
    "mnist": ("--epochs 20 --batch-size 8", "test accuracy 0.9"),
    "convnet_amp": ("--epochs 10 --batch-size 8 --lr 5e-3", "test accuracy 0.9"),
    "gpt": (
        "--parallel fsdp --layers 2 --width 48 --length 64 --epochs 1 --batch-size 16 --sample 20",
        "  test ",
    ),
    "designsafe": (
        "--data houses --arch shufflenet_v2_x0_5 --size 32 --batch-size 4 --lr 1e-3",
        "test accuracy 0.",
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("name", JOBS)
def test_preempted_once_it_finishes(hpc: Hpc, tmp_path: Path, name: str) -> None:
    argv, last_words = JOBS[name]
    if "houses" in argv:
        draw = [sys.executable, str(REPO / "jobs" / "data" / "draw_houses.py")]
        subprocess.run([*draw, str(tmp_path / "houses")], check=True)
        argv = argv.replace("houses", str(tmp_path / "houses"))
    job = hpc.submit(*TWO_BY_TWO, str(REPO / "jobs" / f"{name}.py"), *argv.split())
    assert len(job.event("first_step")["hosts"]) == 2
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")], job.output()
    assert in_one_go(job)
    assert job.output().count(last_words) == 1
    assert "Traceback" not in job.output()
