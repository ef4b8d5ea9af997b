"""A rank that stands still: both ranks say where, and end so that the run can be retried."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from tests.devices import DEVICE, HAS_SIM_RECORD

HANG = {"HPC_DDP_HANG_AFTER": "2"}


@pytest.mark.parametrize(
    ("how", "stuck"),
    [(("--wait", "never"), "in act"), (("--hold", "group"), "in all_reduce")],
)
def test_every_rank_writes_its_stacks(crew: Any, how: tuple[str, ...], stuck: str) -> None:
    launch = crew.launch(2, "--at", "3", "--ranks", "1", *how, **HANG)
    assert launch.wait() == [1, 1], launch.output()
    node = crew.run.attempt(0).node("here")
    assert stuck in node.stacks(1).read_text()
    assert "in act\n" in node.stacks(1).read_text()
    assert "training.py" in node.stacks(0).read_text()
    assert b"in act" not in node.stacks(0).read_bytes()

    failed = {event["rank"]: event for event in crew.events("failed")}
    assert sorted(failed) == [0, 1]
    has_record = DEVICE != "sim" or HAS_SIM_RECORD
    for rank, event in failed.items():
        # Rank 0 is through with step 3, as far as it can be alone; it does not wait for a GPU.
        (step,) = re.findall(r"^HangError: no step for 2 s at step (\d); st", event["error"])
        assert int(step) in ({3, 4} if (DEVICE, rank) == ("cuda", 0) else {3 - rank})
        assert event["error"].endswith(f"stack-rank-{rank}.txt")
        assert "training.py" in event["traceback"]
        assert event["error"] in launch.logs[rank].read_text()
        if has_record:
            assert "entries" in pickle.loads(node.flight(rank).read_bytes())
        else:
            missing = r"no dump of the flight recorder: torch \S+ records no collectives of simccl"
            assert re.search(missing, launch.logs[rank].read_text())
    assert "in act\n" in failed[1]["traceback"]


def test_a_rank_that_holds_pythons_lock_is_seen_too(crew: Any) -> None:
    launch = crew.launch(2, "--at", "3", "--ranks", "1", "--hold", "lock", **HANG)
    assert launch.wait() == [1, 1], launch.output()
    node = crew.run.attempt(0).node("here")
    assert "in act\n" in node.stacks(1).read_text()
    (failed,) = crew.events("failed")
    assert failed["rank"] == 0
    assert failed["error"].startswith("HangError: ")


def test_slow_steps_and_a_long_end_are_no_hang(crew: Any) -> None:
    env = {"HPC_DDP_HANG_AFTER": "1.5"}
    crew.go(1, "--samples", "32", "--epochs", "1", "--step-seconds", "0.5", "--late", "2.2", **env)
    assert not list(crew.run.logs.glob("attempt-0/*/*"))
