"""The groups of a tree of ranks, and the thread that carries messages."""

from __future__ import annotations

import threading

import pytest

from hpc_ddp.training.process.control_tree import FANOUT, _CallQueue, ranks_of_levels


@pytest.mark.parametrize(
    ("world_size", "fanout"), [(1, 2), (2, 2), (3, 2), (5, 2), (33, FANOUT), (100, 3), (8192, 32)]
)
def test_the_groups_are_one_tree(world_size: int, fanout: int) -> None:
    levels = [ranks_of_levels(rank, world_size, fanout) for rank in range(world_size)]
    groups = {(depth, *ranks) for of_rank in levels for depth, ranks in enumerate(of_rank)}
    members = {(depth, rank) for depth, *ranks in groups for rank in ranks}
    assert len(members) == sum(len(ranks) for _, *ranks in groups)  # each in one at a level
    for depth, *ranks in groups:
        assert len(ranks) <= fanout
        assert ranks == sorted(ranks)
        for rank in ranks:
            assert levels[rank][depth] == ranks
    tops = [rank for rank in range(world_size) if all(r[0] == rank for r in levels[rank])]
    assert tops == [0]
    connections = [sum(len(ranks) - 1 for ranks in of_rank) for of_rank in levels]
    assert max(connections) <= (fanout - 1) * max(map(len, levels), default=0)


def test_eight_thousand_ranks_have_few_connections_and_hops() -> None:
    levels = ranks_of_levels(0, 8192, FANOUT)
    assert [len(ranks) for ranks in levels] == [16, 16, 16, 2]
    assert sum(len(ranks) - 1 for ranks in levels) == 46
    assert sum(len(ranks) - 1 for ranks in ranks_of_levels(1, 8192, FANOUT)) == 15


def test_calls_are_made_in_their_order_and_errors_are_raised_where_they_are_awaited() -> None:
    calls, may_begin = _CallQueue(), threading.Event()
    order: list[int] = []

    def begin() -> str:
        may_begin.wait(60)
        order.append(1)
        return "begun"

    def fail() -> None:
        raise RuntimeError("a peer is gone")

    first = calls.begin(begin)
    failed = calls.begin(fail)
    second = calls.begin(lambda: order.append(2))
    may_begin.set()
    second.wait()
    assert order == [1, 2]
    with pytest.raises(RuntimeError, match="a peer is gone"):
        failed.wait()
    assert first.wait() == "begun"
    assert calls.run(lambda: 5) == 5
