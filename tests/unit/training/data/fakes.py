"""Data sets and loaders of the tests, and ways to cut them into batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from hpc_ddp.training.data.batch_plan import BatchPlan, Position, make_plan
from hpc_ddp.training.data.loader import Loader
from hpc_ddp.training.devices import CPU
from unit.training.fakes import draw_numbers


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


class EndlessStream(IterableDataset[float]):
    """A stream of numbers, the epoch if it is set, and random numbers."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        offset = random.random()
        for number in range(9):
            yield number, self.epoch, offset, random.random()


def make_loader(dataset: Any = None, cut: BatchPlan | None = None, **options: Any) -> Loader:
    fields: dict[str, Any] = {"position": Position(), "device": CPU, "seed": 1}
    fields |= {"check_batch": lambda: None, "set_sync": lambda on: None, "end_batch": lambda: None}
    return Loader(dataset or Numbers(), cut or BatchPlan(4, 0, 1), **{**fields, **options})


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    boxes: list[torch.Tensor]
    name: str
    area: int = field(init=False, default=3)


class NoisyNumbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), *draw_numbers()])


def make_noisy_loader(rank: int = 0, world_size: int = 1, **options: Any) -> Loader:
    cut = BatchPlan(4 * world_size, rank, world_size)
    return make_loader(NoisyNumbers(), cut, **{"seed": 1, **options})


small_sizes = st.integers(1, 9)


@st.composite
def batch_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the arguments of `Run.loader`, but for the data set."""
    name = draw(st.sampled_from(["batch_size", "global_batch_size"]))
    size = {"batch_size": None, "global_batch_size": None, name: draw(small_sizes)}
    return {**size, "accumulate": draw(st.integers(1, 4))}


def plans_of(way: dict[str, Any], world_size: int, drop_last: bool = False) -> list[BatchPlan]:
    return [
        make_plan(**way, rank=rank, world_size=world_size, drop_last=drop_last)
        for rank in range(world_size)
    ]
