"""Ranks whose messages go over a tree of groups agree as those of one group do."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.devices import DEVICE
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("ranks", "fanout", "most"),
    [(2, 2, 0), (3, 2, 2), (4, 3, 3)],  # 3 of 2: the last one is alone in its group
)
def test_all_messages_arrive(crew: Any, ranks: int, fanout: int, most: int) -> None:
    output = crew.go(ranks, "--fanout", str(fanout), script="control_tree.py")
    lines = sorted(line.split() for line in output.splitlines() if line.startswith("RANK"))
    assert [int(rank) for _, rank, _ in lines] == list(range(ranks))
    assert max(int(connections) for *_, connections in lines) == most


def test_over_a_tree_a_run_stops_and_ends_with_the_same_bits(
    make_crew: Callable[[str], Any],
) -> None:
    whole, tree = make_crew("whole"), make_crew("tree")
    whole.go(4)
    words = ("--fanout", "2", "--save-every-steps", "3", "--at")
    stopped = tree.launch(4, *words, "5", "--signal", str(int(signal.SIGTERM)), "--ranks", "3")
    assert stopped.wait() == [0] * 4, stopped.output()
    (stop,) = tree.events("stopped")
    killed = tree.launch(4, *words, "15", "--signal", str(int(signal.SIGKILL)), "--ranks", "2")
    if DEVICE == "cuda":  # what waits in NCCL's kernels is for the agent to end
        wait_until(lambda: killed.has_ended(2), "the end of rank 2", killed.output)
        killed.signal(signal.SIGKILL)
    codes = killed.wait()
    assert codes[2] == -signal.SIGKILL, killed.output()
    assert 0 not in codes  # a peer that is gone ends them all
    tree.go(4, *words[:2])
    assert tree.weights == whole.weights
    assert 5 <= stop["step"] < 15
