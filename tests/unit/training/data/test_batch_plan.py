"""The order of samples is a function of seed and epoch, cut into steps for any number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.data.batch_plan import (
    LISTED,
    BatchPlan,
    FormulaOrder,
    MicroBatch,
    Position,
    derive_seed,
    make_plan,
    permutation,
)
from unit.training.data.fakes import batch_arguments, plans_of, small_sizes

sizes = st.integers(1, 60)
ranks = st.integers(1, 7)


def steps(walk: list[MicroBatch]) -> list[list[MicroBatch]]:
    """Put one rank's shares together by optimizer step."""
    ends = [0, *(i + 1 for i, share in enumerate(walk) if share.ends_step)]
    assert ends[-1] == len(walk)
    return [walk[a:b] for a, b in pairwise(ends)]


@given(
    sizes,
    st.lists(st.tuples(batch_arguments(), ranks, st.integers(0, 4)), max_size=4),
    st.tuples(batch_arguments(), ranks),
    st.booleans(),
)
def test_each_sample_is_taken_once_over_attempts_of_any_shape(
    samples: int,
    attempts: list[tuple[dict[str, Any], int, int]],
    last: tuple[dict[str, Any], int],
    drop_last: bool,
) -> None:
    places: list[int] = []
    position = 0
    for way, world_size, stop in [*attempts, (*last, samples)]:
        plans = plans_of(way, world_size, drop_last)
        walks = [steps(list(cut.micro_batches(samples, position)))[:stop] for cut in plans]
        assert len({len(walk) for walk in walks}) == 1  # all ranks take the same steps
        for step in zip(*walks, strict=True):
            assert len({len(pieces) for pieces in step}) == 1  # and the same micro-batches
            assert 1 <= len(step[0]) <= way["accumulate"]
            position += step[0][-1].total
            shares = [share for pieces in step for share in pieces]
            places += [place for share in shares if share.weight for place in share.places]
            assert all(1 <= len(share.places) <= max(2, plans[0].batch_size) for share in shares)
    remaining = range(position, samples)
    assert sorted(places) == list(range(samples))[:position]
    assert len(remaining) < plans[0].size if drop_last else not remaining


@given(sizes, batch_arguments(), ranks, st.integers(0, 59), st.booleans())
def test_the_last_step_of_an_epoch_is_marked(
    samples: int, way: dict[str, Any], world_size: int, start: int, drop_last: bool
) -> None:
    start = min(start, samples)
    for cut in plans_of(way, world_size, drop_last):
        walk = steps(list(cut.micro_batches(samples, start)))
        assert len(walk) == cut.steps_from(start, samples)
        flags = [{share.ends_epoch for share in pieces} for pieces in walk]
        assert flags == [{i == len(walk) - 1} for i in range(len(walk))]
        if drop_last and start % cut.size == 0:
            assert len(walk) == (samples - start) // cut.size
        if drop_last:  # but for the rest of an epoch that steps of another size have begun
            is_begun = start % cut.size > 0
            for pieces in walk[: len(walk) - is_begun]:
                assert all(share.total == cut.size for share in pieces)


def test_the_rest_of_an_epoch_that_other_steps_have_begun_is_a_step() -> None:
    """With drop_last each attempt would end in an error: an epoch has at least one batch."""
    cut = BatchPlan(24, 0, 1, drop_last=True)
    assert [cut.steps_from(start, 100) for start in (72, 80, 88, 96, 100)] == [1, 1, 1, 0, 0]
    sizes_seen = [[b.total for b in cut.micro_batches(100, start)] for start in (40, 64, 88)]
    assert sizes_seen == [[24, 24, 12], [24, 12], [12]]  # wherever an attempt begins
    (rest,) = cut.micro_batches(100, 80)
    assert (rest.places, rest.ends_epoch) == (range(80, 100), True)


@given(sizes, batch_arguments(), ranks)
def test_weighted_means_add_up_to_the_mean_of_the_global_batch(
    samples: int, way: dict[str, Any], world_size: int
) -> None:
    values = torch.randn(samples, dtype=torch.float64)
    walks = [steps(list(cut.micro_batches(samples, 0))) for cut in plans_of(way, world_size)]
    first = 0
    for step in zip(*walks, strict=True):
        block = values[first : (first := first + step[0][0].total)]
        means = [
            values[list(share.places)].mean() * share.weight for pieces in step for share in pieces
        ]
        assert torch.isclose(torch.stack(means).sum() / world_size, block.mean())


@given(sizes, small_sizes, ranks, ranks)
def test_steps_of_a_global_batch_do_not_depend_on_the_ranks(
    samples: int, size: int, first: int, second: int
) -> None:
    def blocks(world_size: int) -> list[list[int]]:
        way = {"batch_size": None, "global_batch_size": size, "accumulate": 2}
        walks = [steps(list(cut.micro_batches(samples, 0))) for cut in plans_of(way, world_size)]
        return [
            sorted(i for pieces in step for share in pieces if share.weight for i in share.places)
            for step in zip(*walks, strict=True)
        ]

    assert blocks(first) == blocks(second)


def test_a_full_batch_weighs_exactly_one() -> None:
    for world_size in range(1, 50):
        (share,) = BatchPlan(world_size * 7, 0, world_size).micro_batches(world_size * 7, 0)
        assert share.weight == 1.0


def test_micro_batches_differ_by_one_sample_at_most() -> None:
    (*_, tail) = steps(list(BatchPlan(64, 0, 2, accumulate=4).micro_batches(64 + 18, 0)))
    assert [len(share.places) for share in tail] == [5, 4]  # not 8 and a single one


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
def test_impossible_batch_sizes_are_refused(way: dict[str, int], words: str) -> None:
    arguments = {"batch_size": None, "global_batch_size": None, "accumulate": 1, **way}
    with pytest.raises(UsageError, match=words):
        plans_of(arguments, 1)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    state = torch.get_rng_state()
    first = permutation(100, 0, 0)[:]
    assert torch.equal(first, permutation(100, 0, 0)[:])
    assert not torch.equal(first, permutation(100, 0, 1)[:])
    assert not torch.equal(first, permutation(100, 1, 0)[:])
    assert torch.equal(state, torch.get_rng_state())


def test_the_order_and_derived_seeds_never_change() -> None:
    # A run that is resumed by a later version of this package keeps its order.
    assert derive_seed(0, 0) == 5104172916443561106
    assert derive_seed(1, 2, 3) != derive_seed(1, 23)
    generator = torch.Generator().manual_seed(derive_seed(3, 4))
    assert torch.equal(permutation(1000, 3, 4)[:], torch.randperm(1000, generator=generator))


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 100, 1025, 70000])
def test_an_order_by_formula_has_each_sample_once(samples: int) -> None:
    sequence = FormulaOrder(samples, 3, 4)
    whole = sequence[0:samples]
    assert torch.equal(whole.sort().values, torch.arange(samples))
    assert torch.equal(sequence[1 : samples + 5 : 2], whole[1::2])


def test_an_order_by_formula_is_one_of_all_orders() -> None:
    """Few samples show it: each of the 24 orders of four comes about as often as any other."""
    orders = Counter(tuple(FormulaOrder(4, seed, 0)[0:4].tolist()) for seed in range(4800))
    assert len(orders) == 24
    assert 140 < min(orders.values()) <= max(orders.values()) < 260  # 200 ± 4 standard deviations


def test_an_order_by_formula_depends_on_seed_and_epoch_and_never_changes() -> None:
    state = torch.get_rng_state()
    first = FormulaOrder(10**9, 0, 1)[5:8]
    assert first.tolist() == [384808024, 552054688, 718662585]
    assert torch.equal(FormulaOrder(10**9, 0, 1)[7:8], first[2:])
    assert not torch.equal(FormulaOrder(10**9, 0, 2)[5:8], first)
    assert not torch.equal(FormulaOrder(10**9, 1, 1)[5:8], first)
    assert torch.equal(state, torch.get_rng_state())


def test_an_order_is_calculated_on_the_cpu() -> None:
    with torch.device("meta"):
        assert FormulaOrder(10**9, 0, 1)[5:8].device.type == "cpu"


def test_many_samples_are_ordered_by_formula() -> None:
    assert isinstance(permutation(LISTED, 0, 0), torch.Tensor)
    assert isinstance(permutation(LISTED + 1, 0, 0), FormulaOrder)


def test_a_new_position_is_before_the_first_step() -> None:
    numbers = {"step": 0, "epoch": 0, "samples": 0, "epoch_steps": 0}
    assert vars(Position()) == {
        **numbers,
        "abandoned": {},
        "loops": 0,
        "loop": None,
        "has_ended": False,
        "is_behind": False,
        "passes": 0,
    }


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("samples", range(1, 20))
def test_all_ranks_have_as_many_samples_where_that_is_asked_for(
    samples: int, accumulate: int
) -> None:
    """Collectives in a training's forward need it; a rest of fewer samples than ranks is left out,
    or where there is nothing else, on all ranks."""
    plans = [make_plan(2, None, accumulate, rank, 3, even=True) for rank in range(3)]
    epochs = [[*plan.micro_batches(samples, 0)] for plan in plans]
    for alike in zip(*epochs, strict=True):
        assert len({len(piece.places) for piece in alike}) == 1
    size = 6 * accumulate
    for first in range(0, samples, size):
        block = range(first, min(first + size, samples))
        pieces = [piece for plan in plans for piece in plan.split_batch(block, ends_epoch=False)]
        used = {place for piece in pieces for place in piece.places}
        assert len(block) - len(used) == (len(block) % 3 if len(block) >= 3 else 0)
        assert sum(piece.weight for piece in pieces) == pytest.approx(3)
        assert {piece.total for piece in pieces} == {len(block)}
