"""A rank that is slower than the others is named, though all of them end their steps together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hpc_ddp.core.journal.events import StepTiming
from hpc_ddp.core.journal.stragglers import Slow, slow_rank
from tests.devices import DEVICE


def measure(crew: Any, ranks: int, *words: str) -> tuple[list[Any], list[Slow]]:
    """Return the `ranks` events, and who was named at any time: a busy machine is slow as well."""
    crew.go(ranks, *words, script="straggler.py")
    events: list[Any] = crew.events("ranks")
    timings = [event for event in crew.run.events() if isinstance(event, StepTiming)]
    found = [slow_rank(timings[:end]) for end in range(len(timings) + 1)]
    return events, [slow for slow in found if slow]


def test_a_rank_with_more_work_is_named(crew: Any) -> None:
    events, found = measure(crew, 4, "--slow", "2", "--in", "work")
    assert (found[-1].rank, found[-1].node, found[-1].data) == (2, "here", False), events
    assert Counter(slow.rank for slow in found).most_common(1)[0][0] == 2, found
    last = events[-1]
    assert len(last["busy_s"]) == len(last["data_s"]) == 4
    assert last["steps"] > 0
    for event in events:
        assert event["step_s"] >= 0.06  # all of them wait for it
        if DEVICE == "cpu" or "busy_s" in event:  # a device may still be at its first sample
            assert event["busy_s"][2] >= 0.06


@pytest.mark.parametrize(
    "words",
    [
        # The others wait for rank 0's buffers as their forward begins, not for its gradients.
        ("--slow", "0", "--norm"),
        pytest.param(("--slow", "1", "--norm"), marks=pytest.mark.more),
        pytest.param(("--slow", "1", "--accumulate", "2"), marks=pytest.mark.more),
        # FSDP waits within forward and backward: what a rank's own work is can't be told.
        pytest.param(("--slow", "1", "--sharded"), marks=pytest.mark.more),
    ],
)
def test_a_rank_that_waits_for_data_is_told_apart(crew: Any, words: tuple[str, ...]) -> None:
    events, found = measure(crew, 2, "--in", "data", *words)
    assert (found[-1].rank, found[-1].data) == (int(words[1]), True), events
    assert ("busy_s" in events[-1]) == ("--sharded" not in words)
