"""Ranks are arranged in pipeline stages, data and tensor parallel groups."""

from __future__ import annotations

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.models.mesh import ParallelDims


def test_neighbouring_ranks_are_tensor_parallel() -> None:
    ranks = [ParallelDims(rank, 12, tp=2, pp=3) for rank in range(12)]
    assert ranks[0].dp == 2
    places = [(dims.pp_rank, dims.dp_rank, dims.tp_rank) for dims in ranks]
    assert places == [(p, d, t) for p in range(3) for d in range(2) for t in range(2)]
    # Those of a stage write what it has; one of each copy of the model tells the loss.
    assert [dims.stage_rank for dims in ranks] == [0, 1, 2, 3] * 3
    assert [dims.rank for dims in ranks if dims.counts] == [8, 10]
    # A tensor parallel group draws the same random numbers, all others others.
    assert [dims.stream for dims in ranks] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_plain_ranks_are_all_data_parallel() -> None:
    dims = ParallelDims(2, 4)
    assert (dims.dp, dims.dp_rank, dims.stage_rank, dims.stream, dims.counts) == (4, 2, 2, 2, True)


def test_sizes_have_to_divide_the_workers() -> None:
    with pytest.raises(UsageError, match="tp=2 and pp=2 with 6 workers") as caught:
        ParallelDims(0, 6, tp=2, pp=2)
    assert caught.value.hint == "start 4 workers, or a multiple of it"
    with pytest.raises(UsageError, match=r"tp=2 and pp=1, replicas=3 with 8 workers") as caught:
        ParallelDims(0, 8, tp=2, replicas=3)
    assert caught.value.hint == "start 6 workers, or a multiple of it"


def test_replicas_divide_the_data_parallel_ranks() -> None:
    dims = ParallelDims(5, 12, tp=2, replicas=3)
    assert (dims.dp, dims.shards, dims.dp_rank) == (6, 2, 2)
