"""Iterable data sets are cut into the same batches by any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.data.batch_plan import BatchPlan, Position
from hpc_ddp.training.data.iterable import IterableBatches
from hpc_ddp.training.models import rng
from unit.training.data.fakes import EndlessStream, batch_arguments, plans_of


def _stream(position: Position, seed: int = 1) -> list[Any]:
    with rng.preserve_generators():
        random.seed(position.samples)
        walk = IterableBatches(EndlessStream(), BatchPlan(3, 0, 1), seed, position, list)
        return [row for _, batch in walk for row in batch]


def test_random_numbers_of_a_stream_depend_on_seed_and_epoch_alone() -> None:
    whole_epoch = _stream(Position(epoch=2))
    assert [row[:2] for row in whole_epoch] == [(number, 2) for number in range(9)]
    assert _stream(Position(epoch=2, samples=6)) == whole_epoch[6:]
    for rows in (_stream(Position(epoch=3)), _stream(Position(epoch=2), seed=2)):
        assert all(row[2:] != expected[2:] for row, expected in zip(rows, whole_epoch, strict=True))
    assert len({row[3] for row in whole_epoch}) == 9


class Shuffled(IterableDataset[int]):
    """A stream that draws its order before its first sample."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(90), 90))


def test_a_stream_that_shuffles_itself_continues_in_its_order() -> None:
    def numbers(position: Position) -> list[int]:
        walk = IterableBatches(Shuffled(), BatchPlan(3, 0, 1), 1, position, list)
        return [number for _, batch in walk for number in batch]

    every = numbers(Position(epoch=2))
    assert numbers(Position(epoch=2, samples=6)) == every[6:]
    assert numbers(Position(epoch=3)) != every


def test_random_numbers_of_collate_depend_on_seed_and_epoch_alone() -> None:
    def draws(position: Position) -> list[float]:
        with rng.preserve_generators():
            walk = IterableBatches(
                EndlessStream(), BatchPlan(3, 0, 1), 1, position, lambda batch: random.random()
            )
            return [drawn for _, drawn in walk]

    every = draws(Position(epoch=2))
    assert draws(Position(epoch=2)) == every
    assert draws(Position(epoch=2, samples=3)) == every[1:]
    assert len({*every, *draws(Position(epoch=3))}) == 6


def test_a_loader_worker_makes_its_share_and_hides_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sees(EndlessStream):
        def __iter__(self) -> Iterator[Any]:
            for number in range(9):
                yield number, get_worker_info() is None

    def collate(batch: list[Any]) -> tuple[list[Any], Any]:
        return batch, get_worker_info()  # by which Transformers' collators seed a generator

    worker: Any = SimpleNamespace(id=1, num_workers=2)
    monkeypatch.setattr(torch_worker, "_worker_info", worker)
    walk = list(IterableBatches(Sees(), BatchPlan(2, 0, 1), 1, Position(), collate))
    batches = [[(2, True), (3, True)], [(6, True), (7, True)]]
    assert [content for _, content in walk] == [(batch, worker) for batch in batches]


class RecordedStream(IterableDataset[int]):
    """The numbers below `samples`; with `skip` as Hugging Face's has it, if that is wanted."""

    def __init__(self, samples: int, start: int = 0) -> None:
        self.samples, self.start = samples, start
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for number in range(self.start, self.samples):
            self.read.append(number)
            yield number


class SkippingStream(RecordedStream):
    def skip(self, n: int) -> RecordedStream:
        return RecordedStream(self.samples, self.start + n)


@given(
    *(st.integers(0, 40), batch_arguments(), st.integers(1, 4), st.integers(0, 20)),
    *(st.booleans(), st.booleans()),
)
def test_a_stream_is_cut_like_a_data_set(
    samples: int, way: dict[str, Any], world_size: int, start: int, drop_last: bool, even: bool
) -> None:
    for uneven in plans_of(way, world_size, drop_last):
        cut = replace(uneven, even=even)
        position = Position(samples=min(start, samples))
        position.samples -= position.samples % cut.size * drop_last
        expected = list(cut.micro_batches(samples, position.samples))
        for dataset in (RecordedStream(samples), SkippingStream(samples)):
            walk = list(IterableBatches(dataset, cut, 0, position, list))
            assert [share for share, _ in walk] == expected
            assert [batch for _, batch in walk] == [list(share.places) for share in expected]


def test_what_is_called_skip_has_to_be_one() -> None:
    lines: Any = RecordedStream(100)
    lines.skip = 1  # of lines in each file
    plan, position = BatchPlan(8, 0, 1), Position(samples=16)
    assert next(iter(IterableBatches(lines, plan, 0, position, list)))[1] == list(range(16, 24))
    lines.skip = lambda n: None
    with pytest.raises(UsageError, match=r"RecordedStream\.skip\(16\) has returned None; accepted"):
        next(iter(IterableBatches(lines, plan, 0, position, list)))


def test_a_stream_is_read_one_global_batch_ahead_and_no_further() -> None:
    numbers = RecordedStream(100)
    next(iter(IterableBatches(numbers, BatchPlan(8, 0, 2), 0, Position(samples=16), list)))
    assert numbers.read == list(range(32))
    skipping = SkippingStream(100)
    next(iter(IterableBatches(skipping, BatchPlan(8, 0, 2), 0, Position(samples=16), list)))
    assert not skipping.read
