"""Which samples a rank takes, as pure functions of seed, epoch and position.

All ranks walk one permutation. The position in it is the number of samples that all of them
together have consumed, so a run can go on at any step with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch


@dataclass
class Position:
    """Where a run is: `step` completed optimizer steps, `samples` consumed in `epoch`."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Share:
    """One rank's part of one global batch.

    `indices` are never empty: a rank that has none left repeats some, with `weight` zero.
    """

    indices: tuple[int, ...]
    weight: float  # for the gradient of this rank's mean loss; see `share_of`
    total: int  # samples in the global batch


def derive(*parts: int) -> int:
    """Return a seed of 63 bits from integers; near ones give unrelated seeds."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def permutation(samples: int, seed: int, epoch: int, shuffle: bool = True) -> torch.Tensor:
    """Return the order of an epoch, int64 of shape (samples,), leaving global generators alone."""
    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed(derive(seed, epoch))
    return torch.randperm(samples, generator=generator)


def step_count(samples: int, batch_size: int, world_size: int, drop_last: bool) -> int:
    """Return how many steps `samples` are worth, the same on every rank."""
    full, rest = divmod(samples, batch_size * world_size)
    return full + (0 if drop_last else bool(rest))


def share_of(block: torch.Tensor, rank: int, world_size: int) -> Share:
    """Return what `rank` takes of a global batch, a tensor of sample indices.

    DistributedDataParallel divides the sum of the ranks' gradients by the number of ranks.
    With each rank's mean loss weighted by n_rank * ranks / n_total, the result is the mean
    over the samples of the global batch, however unevenly they are spread.
    """
    mine = block[rank::world_size].tolist()
    weight = len(mine) * world_size / len(block)
    repeated = block[:2].tolist()  # two, since batch norm refuses a single one
    return Share(tuple(mine or repeated), weight, len(block))


def shares(
    order: torch.Tensor, start: int, batch_size: int, rank: int, world_size: int, drop_last: bool
) -> Iterator[Share]:
    """Yield one rank's shares of what is left of an epoch's `order` from position `start` on."""
    size = batch_size * world_size
    steps = step_count(len(order) - start, batch_size, world_size, drop_last)
    for first in range(start, start + steps * size, size):
        yield share_of(order[first : first + size], rank, world_size)
