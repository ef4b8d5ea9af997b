from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.training.order import derive, permutation, share_of, shares, step_count

sizes = st.integers(1, 60)
ranks = st.integers(1, 7)
batches = st.integers(1, 9)


@given(sizes, batches, st.lists(st.tuples(ranks, st.integers(0, 4)), max_size=4), ranks)
def test_each_sample_is_taken_once_whoever_goes_on(
    samples: int, batch: int, attempts: list[tuple[int, int]], last: int
) -> None:
    order = permutation(samples, seed=1, epoch=2)
    taken: list[int] = []
    position = 0
    for world_size, steps in [*attempts, (last, samples)]:
        walks = [
            list(shares(order, position, batch, rank, world_size, drop_last=False))[:steps]
            for rank in range(world_size)
        ]
        assert len({len(walk) for walk in walks}) == 1  # all ranks take the same steps
        for step in zip(*walks, strict=True):
            position += step[0].total
            taken += [i for share in step if share.weight for i in share.indices]
    assert position == samples
    assert sorted(taken) == list(range(samples))


@given(st.integers(1, 40), ranks)
def test_weighted_means_average_to_the_mean_of_the_global_batch(total: int, ranks: int) -> None:
    values = torch.randn(total, dtype=torch.float64)
    parts = [share_of(torch.arange(total), rank, ranks) for rank in range(ranks)]
    means = [values[list(part.indices)].mean() * part.weight for part in parts]
    assert torch.isclose(torch.stack(means).sum() / ranks, values.mean())
    assert all(part.indices for part in parts)


@given(sizes, batches, ranks, st.integers(0, 30))
def test_drop_last_drops_only_the_last_incomplete_global_batch(
    samples: int, batch: int, world_size: int, start: int
) -> None:
    start = min(start, samples)
    order = torch.arange(samples)
    walk = list(shares(order, start, batch, 0, world_size, drop_last=True))
    assert len(walk) == step_count(samples - start, batch, world_size, drop_last=True)
    assert len(walk) == (samples - start) // (batch * world_size)
    assert all(share.total == batch * world_size and share.weight == 1 for share in walk)


def test_a_full_batch_weighs_exactly_one() -> None:
    for world_size in range(1, 50):
        assert share_of(torch.arange(world_size * 7), 0, world_size).weight == 1.0


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    state = torch.get_rng_state()
    first = permutation(100, 0, 0)
    assert torch.equal(first, permutation(100, 0, 0))
    assert not torch.equal(first, permutation(100, 0, 1))
    assert not torch.equal(first, permutation(100, 1, 0))
    assert torch.equal(permutation(5, 0, 0, shuffle=False), torch.arange(5))
    assert torch.equal(state, torch.get_rng_state())


def test_derived_seeds_stay_what_they_are() -> None:
    # A run that is resumed by a later version of this package keeps its order.
    assert derive(0, 0) == 5104172916443561106
    assert derive(1, 2, 3) != derive(1, 23)
