"""A sweep that is played on this machine, by a script that needs no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.children import start_child
from tests.waiting import LIMIT_S, wait_until

REPO = Path(__file__).parents[2]
SCRIPT = """
import sys, time
seconds = float(sys.argv[1].removeprefix("--seconds="))
time.sleep(seconds)
"""


class Sweep:
    def __init__(self, folder: Path, *words: str, script: str = SCRIPT) -> None:
        self.folder = folder
        (folder / "train.py").write_text(script)
        self.process = self.start("sweep", "--backend", "local", *words)
        wait_until(self.paths, "the sweep's folder", self.log.read_text)
        (self.path,) = self.paths()

    def paths(self) -> list[Path]:
        return list(self.folder.glob("runs/train/*"))

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        env = dict(os.environ, HPC_DDP_RUNS=str(self.folder / "runs"), PYTHONPATH=str(REPO))
        argv = [sys.executable, "-m", "hpc_ddp", *words]
        with open(self.log, "w") as log:
            return start_child(argv, cwd=self.folder, env=env, stdout=log, stderr=log)

    @property
    def log(self) -> Path:
        return self.folder / "printed"

    def call(self, *words: str) -> str:
        """Run a command; return what it printed."""
        self.start(*words).wait(LIMIT_S)
        return self.log.read_text()

    def status(self) -> tuple[str, list[str]]:
        """Return the state of the whole, and those of the tasks."""
        (told,) = json.loads(self.call("status", "--json", str(self.path)))
        tasks: list[dict[str, Any]] = told["tasks"]
        return told["state"], [task["state"] for task in tasks]

    def until_task(self, index: int, attempt: int = 0) -> None:
        pids = f"task-{index}/logs/attempt-{attempt}/local-0/rank-0.pid"
        wait_until((self.path / pids).exists, f"task {index} at work", self.log.read_text)


@pytest.fixture
def slow_second(tmp_path: Path) -> Sweep:
    sweep = Sweep(tmp_path, "--launcher", "srun", "--set", "seconds=0,600,0.1", "train.py")
    sweep.until_task(1)
    return sweep


def test_stopped_it_says_so_and_goes_on(slow_second: Sweep) -> None:
    sweep = slow_second
    assert sweep.status() == ("running", ["finished", "running", "not begun"])
    sweep.process.send_signal(signal.SIGTERM)
    assert sweep.process.wait(LIMIT_S) == 75
    assert f"go on with: hpc-ddp dry-run --run {sweep.path}\n" in sweep.log.read_text()
    assert sweep.status() == ("array", ["finished", "stopped", "not begun"])
    words = ("--json", "--run", str(sweep.path), "--backend", "local", "--array", "2")
    answer = sweep.call("submit", *words).splitlines()[-1]
    assert json.loads(answer) == {"exit_code": 0, "run": str(sweep.path)}
    assert sweep.status()[1] == ["finished", "stopped", "finished"]
    rendered = sweep.call("render", "--run", str(sweep.path))
    assert "#SBATCH --array=1\n" in rendered  # what one submit left out is not forgotten


def test_cancelled_it_ends(slow_second: Sweep) -> None:
    sweep = slow_second
    sweep.call("cancel", str(sweep.path))
    assert sweep.process.wait(LIMIT_S) != 0
    assert sweep.status() == ("cancelled", ["finished", "cancelled", "not begun"])
    again = sweep.start("submit", "--run", str(sweep.path), "--backend", "local", "--array", "1")
    sweep.until_task(1, attempt=1)  # whoever goes on with it wants its tasks to run
    again.send_signal(signal.SIGTERM)
    assert again.wait(LIMIT_S) == 75


def test_its_trials_are_named_and_the_best_one_can_be_repeated(tmp_path: Path) -> None:
    script = "import sys\nfrom hpc_ddp.training import start\nrun = start()\n"
    script += "score = float(sys.argv[1].removeprefix('--score='))\nprint('scores', score)\n"
    script += "run.finish(score=score)\n"
    sweep = Sweep(tmp_path, "--launcher", "srun", "--set", "score=1,3", "train.py", script=script)
    assert sweep.process.wait(LIMIT_S) == 0, sweep.log.read_text()
    rows = [["1", "3", "finished"], ["0", "1", "finished"]]
    best = "best: task 1 (score=3), with the highest score, 3"
    again = f"rerun {sweep.path}/task-1"
    for printed in (sweep.log.read_text(), sweep.call("status", str(sweep.path))):
        lines = printed[printed.index("task  score") :].splitlines()
        assert [line.split()[:3] for line in lines[1:3]] == rows
        assert printed.endswith(f"{best}\nagain: hpc-ddp {again}\n")
    logs = sweep.call("logs", str(sweep.path))
    for index, score in enumerate((1, 3)):
        assert f"--- task {index} (score={score}), attempt 0 began" in logs
    explanation = " ".join(sweep.call("explain", str(sweep.path)).split())
    assert "task 0 (score=1): finished; task 1 (score=3): finished" in explanation
    task = sweep.call("explain", str(sweep.path / "task-0"))
    assert task.startswith("Task 0 (score=1) of run train ")
    assert "scores 3.0\n" in sweep.call(*again.split(), "--backend", "local")


def test_a_budget_counts_here_too(tmp_path: Path) -> None:
    words = ("--launcher", "srun", "--set", "seconds=1,0", "--budget-gpu-hours", "0.0001")
    sweep = Sweep(tmp_path, *words, "train.py")
    assert sweep.process.wait(LIMIT_S) == 1
    assert "of 0.0001 GPU hours are spent" in sweep.log.read_text()
    assert sweep.status()[1] == ["finished", "failed"]
