"""A rank that is slower than the others is named, though all of them end their steps together."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_ddp.run.ranks import slow_rank


def measure(crew: Any, ranks: int, *words: str) -> list[Any]:
    crew.go(ranks, *words, script="uneven.py")
    events: list[Any] = crew.events("ranks")
    assert len(events) >= 3, events
    return events


def test_a_rank_with_more_work_is_named(crew: Any) -> None:
    events = measure(crew, 4, "--slow", "2", "--in", "work")
    found = slow_rank(events)
    assert found
    assert (found.rank, found.node, found.data) == (2, "here", False)
    assert found.own_s > 0.028
    last = events[-1]
    assert len(last["busy_s"]) == len(last["data_s"]) == 4
    assert last["busy_s"][2] > max(last["busy_s"][:2]) + 0.01
    assert last["steps"] > 3
    assert last["step_s"] >= 0.028  # all of them wait for it


@pytest.mark.parametrize(
    "words",
    [
        # The others wait for rank 0's buffers as their forward begins, not for its gradients.
        ("--slow", "0", "--norm"),
        pytest.param(("--slow", "1", "--norm"), marks=pytest.mark.soak),
        pytest.param(("--slow", "1", "--accumulate", "2"), marks=pytest.mark.soak),
        # FSDP waits within forward and backward: what a rank's own work is can't be told.
        pytest.param(("--slow", "1", "--sharded"), marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_waits_for_data_is_told_apart(crew: Any, words: tuple[str, ...]) -> None:
    events = measure(crew, 2, "--in", "data", *words)
    found = slow_rank(events)
    assert found
    assert (found.rank, found.data) == (int(words[1]), True)
    assert ("busy_s" in events[-1]) == ("--sharded" not in words)
