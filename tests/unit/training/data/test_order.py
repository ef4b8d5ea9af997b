from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.data.iterable import IterableBatches
from hpc_ddp.training.data.order import (
    BatchPlan,
    MicroBatch,
    Position,
    derive,
    make_plan,
    permutation,
)

sizes = st.integers(1, 60)
ranks = st.integers(1, 7)
small = st.integers(1, 9)


@st.composite
def ways(draw: st.DrawFn) -> dict[str, Any]:
    """What a user says to `Run.loader`, but for the data set."""
    name = draw(st.sampled_from(["batch_size", "global_batch_size"]))
    size = {"batch_size": None, "global_batch_size": None, name: draw(small)}
    return {**size, "accumulate": draw(st.integers(1, 4))}


def cuts(way: dict[str, Any], world_size: int, drop_last: bool = False) -> list[BatchPlan]:
    return [
        make_plan(**way, rank=rank, world_size=world_size, drop_last=drop_last)
        for rank in range(world_size)
    ]


def steps(walk: list[MicroBatch]) -> list[list[MicroBatch]]:
    """Put one rank's shares together by optimizer step."""
    ends = [0, *(i + 1 for i, share in enumerate(walk) if share.ends_step)]
    assert ends[-1] == len(walk)
    return [walk[a:b] for a, b in pairwise(ends)]


@given(
    sizes,
    st.lists(st.tuples(ways(), ranks, st.integers(0, 4)), max_size=4),
    st.tuples(ways(), ranks),
    st.booleans(),
)
def test_each_sample_is_taken_once_whoever_goes_on(
    samples: int,
    attempts: list[tuple[dict[str, Any], int, int]],
    last: tuple[dict[str, Any], int],
    drop_last: bool,
) -> None:
    taken: list[int] = []
    position = 0
    for way, world_size, stop in [*attempts, (*last, samples)]:
        mine = cuts(way, world_size, drop_last)
        walks = [steps(list(cut.micro_batches(samples, position)))[:stop] for cut in mine]
        assert len({len(walk) for walk in walks}) == 1  # all ranks take the same steps
        for step in zip(*walks, strict=True):
            assert len({len(pieces) for pieces in step}) == 1  # and the same micro-batches
            assert 1 <= len(step[0]) <= way["accumulate"]
            position += step[0][-1].total
            shares = [share for pieces in step for share in pieces]
            taken += [place for share in shares if share.weight for place in share.places]
            assert all(1 <= len(share.places) <= max(2, mine[0].batch_size) for share in shares)
    left = range(position, samples)
    assert sorted(taken) == list(range(samples))[:position]
    assert len(left) < mine[0].size if drop_last else not left


@given(sizes, ways(), ranks, st.integers(0, 59), st.booleans())
def test_the_last_step_of_an_epoch_is_told(
    samples: int, way: dict[str, Any], world_size: int, start: int, drop_last: bool
) -> None:
    start = min(start, samples)
    for cut in cuts(way, world_size, drop_last):
        walk = steps(list(cut.micro_batches(samples, start)))
        assert len(walk) == cut.steps(samples - start)
        flags = [{share.ends_epoch for share in pieces} for pieces in walk]
        assert flags == [{i == len(walk) - 1} for i in range(len(walk))]
        if drop_last:
            assert all(share.total == cut.size for pieces in walk for share in pieces)


@given(sizes, ways(), ranks)
def test_weighted_means_add_up_to_the_mean_of_the_global_batch(
    samples: int, way: dict[str, Any], world_size: int
) -> None:
    values = torch.randn(samples, dtype=torch.float64)
    walks = [steps(list(cut.micro_batches(samples, 0))) for cut in cuts(way, world_size)]
    first = 0
    for step in zip(*walks, strict=True):
        block = values[first : (first := first + step[0][0].total)]
        means = [
            values[list(share.places)].mean() * share.weight for pieces in step for share in pieces
        ]
        assert torch.isclose(torch.stack(means).sum() / world_size, block.mean())


@given(sizes, small, ranks, ranks)
def test_steps_of_a_global_batch_do_not_depend_on_the_ranks(
    samples: int, size: int, one: int, other: int
) -> None:
    def blocks(world_size: int) -> list[list[int]]:
        way = {"batch_size": None, "global_batch_size": size, "accumulate": 2}
        walks = [steps(list(cut.micro_batches(samples, 0))) for cut in cuts(way, world_size)]
        return [
            sorted(i for pieces in step for share in pieces if share.weight for i in share.places)
            for step in zip(*walks, strict=True)
        ]

    assert blocks(one) == blocks(other)


def test_a_full_batch_weighs_exactly_one() -> None:
    for world_size in range(1, 50):
        (share,) = BatchPlan(world_size * 7, 0, world_size).micro_batches(world_size * 7, 0)
        assert share.weight == 1.0


def test_micro_batches_differ_by_one_sample_at_most() -> None:
    (*_, tail) = steps(list(BatchPlan(64, 0, 2, accumulate=4).micro_batches(64 + 18, 0)))
    assert [len(share.places) for share in tail] == [5, 4]  # not 8 and a single one


class Numbers(IterableDataset[int]):
    """The numbers below `samples`; with `skip` as Hugging Face's has it, if that is wanted."""

    def __init__(self, samples: int, start: int = 0) -> None:
        self.samples, self.start = samples, start
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for number in range(self.start, self.samples):
            self.read.append(number)
            yield number


class Skipping(Numbers):
    def skip(self, n: int) -> Numbers:
        return Numbers(self.samples, self.start + n)


@given(st.integers(0, 40), ways(), st.integers(1, 4), st.integers(0, 20), st.booleans())
def test_a_stream_is_cut_like_a_data_set(
    samples: int, way: dict[str, Any], world_size: int, start: int, drop_last: bool
) -> None:
    position = Position(samples=min(start, samples))
    for cut in cuts(way, world_size, drop_last):
        expected = list(cut.micro_batches(samples, position.samples))
        for dataset in (Numbers(samples), Skipping(samples)):
            walk = list(IterableBatches(dataset, cut, 0, position, list))
            assert [share for share, _ in walk] == expected
            assert [batch for _, batch in walk] == [list(share.places) for share in expected]


def test_a_stream_is_read_one_global_batch_ahead_and_no_further() -> None:
    numbers = Numbers(100)
    next(iter(IterableBatches(numbers, BatchPlan(8, 0, 2), 0, Position(samples=16), list)))
    assert numbers.read == list(range(32))
    skipping = Skipping(100)
    next(iter(IterableBatches(skipping, BatchPlan(8, 0, 2), 0, Position(samples=16), list)))
    assert not skipping.read


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0; accepted: a whole number from 1"),
        ({"global_batch_size": -1}, "global_batch_size is -1"),
        ({"batch_size": 8, "accumulate": 0}, "accumulate is 0"),
        ({}, "neither of batch_size and global_batch_size"),
        ({"batch_size": 8, "global_batch_size": 8}, "both of batch_size and global_batch_size"),
    ],
)
def test_batch_sizes_that_make_no_sense(way: dict[str, int], words: str) -> None:
    whole = {"batch_size": None, "global_batch_size": None, "accumulate": 1, **way}
    with pytest.raises(UsageError, match=words):
        cuts(whole, 1)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    state = torch.get_rng_state()
    first = permutation(100, 0, 0)
    assert torch.equal(first, permutation(100, 0, 0))
    assert not torch.equal(first, permutation(100, 0, 1))
    assert not torch.equal(first, permutation(100, 1, 0))
    assert torch.equal(state, torch.get_rng_state())


def test_the_order_and_derived_seeds_stay_what_they_are() -> None:
    # A run that is resumed by a later version of this package keeps its order.
    assert derive(0, 0) == 5104172916443561106
    assert derive(1, 2, 3) != derive(1, 23)
    generator = torch.Generator().manual_seed(derive(3, 4))
    assert torch.equal(permutation(1000, 3, 4), torch.randperm(1000, generator=generator))


def test_a_run_begins_before_its_first_step() -> None:
    assert vars(Position()) == {"step": 0, "epoch": 0, "samples": 0, "epoch_steps": 0}
