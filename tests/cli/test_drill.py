"""`drill` on scripts that resume right, and on some that do not: real launches, real kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices import device_env

REPO = Path(__file__).parents[2]
BROKEN = REPO / "tests" / "cli" / "broken"
JOBS = REPO / "jobs"
# Without torchrun, whose import of torch would be a third of each start.
LEAN = ("--launcher", "srun")
Done = subprocess.CompletedProcess[str]


def drill(root: Path, *words: str) -> Done:
    env = {**os.environ, **device_env(), "HPC_DDP_RUNS": str(root / "runs")}
    argv = [sys.executable, "-m", "hpc_ddp", "drill", *words]
    root.mkdir(exist_ok=True)
    return subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True)


CASES = {
    "right": (*LEAN, str(REPO / "tests" / "cli" / "right" / "two_loops.py")),
    **{p.stem: ("--json", *LEAN, str(p)) for p in sorted(BROKEN.glob("*.py"))},
}


def drill_case(name: str, root: Path) -> tuple[Done, Path]:
    """Return how the drill of a case ended, and the folder of its runs."""
    return drill(root / name, *CASES[name]), root / name / "runs"


def test_a_script_that_resumes_right(tmp_path: Path) -> None:
    done, runs = drill_case("right", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("equal, bit for bit, and so are the final weights\n"), done.stdout
    assert "and a byte flipped in step-" in done.stdout
    assert "past step-" in done.stdout
    assert "DIFFERS" not in done.stdout
    assert not list(runs.glob(".drills/*"))  # nothing to look at


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        pytest.param(
            "no_optimizer",
            "wrong",
            "the optimizer `SGD` differs first, at step",
            marks=pytest.mark.more,
        ),
        pytest.param(
            *("no_scheduler", "wrong"),
            "the settings of the optimizer `optimizer` (its learning rate",
            marks=pytest.mark.more,
        ),
        pytest.param("own_generator", "wrong", "the loss differs first", marks=pytest.mark.more),
        pytest.param("own_average", "wrong", "the loss differs first", marks=pytest.mark.more),
        pytest.param(
            *("unseeded", "unsteady", "first in the loss at step 1"),
            marks=pytest.mark.more,
        ),
    ],
)
def test_a_broken_script_fails_for_the_right_reason(
    tmp_path: Path, name: str, verdict: str, words: str
) -> None:
    done, runs = drill_case(name, tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["verdict"] == verdict, told
    assert words in told["why"]
    assert told["hint"]
    assert Path(told["folder"]).parent == runs / ".drills"
    assert Path(told["folder"], "undisturbed").is_dir()
    if name == "no_scheduler":
        assert "run.track does not name a scheduler" in told["why"]


def test_what_can_not_be_drilled_is_said(tmp_path: Path) -> None:
    done = drill(tmp_path, "--steps", "3", str(JOBS / "digits.py"))
    assert done.returncode == 2
    assert "steps is 3; accepted: a whole number from 8" in done.stderr
    (tmp_path / "bad.py").write_text("raise ValueError('no data here')\n")
    done = drill(tmp_path, *LEAN, "bad.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "error: the script fails undisturbed: rank 0 on local-0: ValueError: no data" in done.stderr
    )
    assert "| ValueError: no data here" in done.stderr
    (tmp_path / "other.py").write_text("print('nothing of hpc-ddp')\n")
    done = drill(tmp_path, *LEAN, "other.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "other.py has not called start() of hpc_ddp.training" in done.stderr


@pytest.mark.more
def test_a_script_of_few_steps_can_not_be_drilled(tmp_path: Path) -> None:
    few = (str(JOBS / "linear_regression.py"), "--batch-size", "400", "--epochs", "5")
    done = drill(tmp_path, *LEAN, *few)
    assert done.returncode == 2
    assert "the script takes 5 steps, and a drill needs 8" in done.stderr
    assert not list((tmp_path / "runs").glob(".drills/*"))


KILLS_ITSELF = {"preflight_train.py"}
SMALL = {
    "linear_regression.py": "--epochs 3",
    "gpt.py": "--layers 2 --width 24 --heads 2 --length 32 --epochs 1 --batch-size 256",
    "mnist.py": "--epochs 2",
    "convnet_amp.py": "--epochs 3 --batch-size 8",
    "designsafe.py": "--data houses --size 32 --arch shufflenet_v2_x0_5 --epochs 2 --batch-size 4",
}


def test_a_job_that_resumes_right_is_told_so(tmp_path: Path) -> None:
    done = drill(tmp_path, *LEAN, str(JOBS / "digits.py"), "--epochs", "1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.more
@pytest.mark.parametrize("job", sorted({path.name for path in JOBS.glob("*.py")} - KILLS_ITSELF))
def test_every_job_resumes_right(job: str, tmp_path: Path) -> None:
    argv = SMALL.get(job, "").split()
    if "houses" in argv:
        draw = [sys.executable, str(JOBS / "data" / "draw_houses.py"), "houses", "--size", "32"]
        subprocess.run(draw, check=True, cwd=tmp_path)
    done = drill(tmp_path, "--nodes", "2", "--nproc-per-node", "2", str(JOBS / job), *argv)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumes right: every step is equal" in done.stdout
