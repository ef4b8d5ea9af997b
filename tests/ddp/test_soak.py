"""Kills at random moments. Eight here; ``make soak`` makes it 200 (HPC_DDP_SOAK)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

KILLS = int(os.environ.get("HPC_DDP_SOAK", "8"))
RANKS = 2
JOB = ("--samples", "480", "--epochs", "2", "--width", "128", "--layers", "3")
SAVES = ("--save-every-steps", "3", "--step-seconds", "0.01")
MOMENTS = ("load", "save", "any")


def kill(crew: Any, launch: Any, moment: str, dice: random.Random) -> bool:
    """Kill one rank or all of them at such a moment; False when the run was done before."""
    deadline = time.monotonic() + dice.uniform(*{"load": (0, 1), "any": (0, 4)}.get(moment, (9, 9)))
    while time.monotonic() < deadline:
        if moment == "save" and any(crew.run.checkpoints.glob("*.tmp-*")):
            time.sleep(dice.uniform(0, 0.01))
            break
        if launch.ended():
            return False
        time.sleep(0.002)
    victims = dice.choice([(0,), (1,), (0, 1)])
    launch.signal(signal.SIGKILL, *victims)
    # What torchrun does to the others, less the waiting.
    time.sleep(dice.uniform(0, 0.2))
    launch.signal(signal.SIGKILL)
    return True


@pytest.mark.row(
    "killed at 200 random moments (without Slurm)",
    "never a checkpoint that can't be read, a sample lost, or other weights in the end",
)
def test_no_kill_costs_a_run_its_numbers(make_crew: Callable[[str], Any]) -> None:
    whole = make_crew("whole")
    whole.go(RANKS, *JOB)
    dice = random.Random(os.environ.get("HPC_DDP_SOAK_SEED", "1"))
    done: Counter[str] = Counter()
    runs = 0
    while done.total() < KILLS:
        runs += 1
        crew = make_crew(f"run-{runs}")
        finished = False
        while not finished and done.total() < KILLS:
            moment = dice.choice(MOMENTS)
            launch = crew.launch(RANKS, *JOB, *SAVES)
            finished = not kill(crew, launch, moment, dice)
            done[moment] += not finished
            codes = launch.wait()
            assert "PASSED OVER" not in launch.output(), launch.output()
            if finished:
                assert codes == [0] * RANKS, launch.output()
        if not finished:
            assert "PASSED OVER" not in crew.go(RANKS, *JOB, *SAVES)
        assert crew.weights == whole.weights
    print(f"{done.total()} kills ({dict(done)}) in {runs} runs: all ended with the same weights")
