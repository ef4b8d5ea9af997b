"""The samples that a rank takes, as pure functions of seed, epoch and position.

All ranks walk one permutation. The position in it is the number of samples that all of them
together have consumed, so a run can go on at any step with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from hpc_ddp.core.errors import UsageError

LISTED = 1 << 20  # the most samples whose order is a list, which takes 4 MB, and some ms
ODD = 0x5851F42D4C957F2D  # the multiplier of Knuth's MMIX generator
LoopKey = tuple[str, int]  # a loop's kind, "epochs" or "steps", and its total


@dataclass
class Position:
    """The place of a run: `step` optimizer steps are done, `epoch_steps` of them in `epoch`, which
    is counted from 0; these took `samples` samples of the run's loader, on all ranks together.

    `loops` is the number, from 1, of the loop that the script is in, or was in last; `loop` is that
    loop's kind and total. `abandoned` has, by number, kind and total of each loop that the script
    has left by ``break`` and does not come back to. `has_ended`: a stream has no more samples in
    the epoch. `passes` is the number of the iteration over the loader in which the last step was,
    counted from 1 in the epoch; 0 before a step. `is_behind`: the script is behind the loop, where
    its lines may have changed objects that a checkpoint has.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    epoch_steps: int = 0
    abandoned: dict[int, LoopKey] = field(default_factory=dict)
    loops: int = 0
    loop: LoopKey | None = None
    has_ended: bool = False
    passes: int = 0
    is_behind: bool = field(default=False, compare=False)

    def begin_epoch(self) -> None:
        """Move on to the next epoch's first sample."""
        self.epoch += 1
        self.samples = self.epoch_steps = self.passes = 0
        self.has_ended = False


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one rank: the rank's part of a global batch, or a piece of this part.

    `places` are never empty: a rank without samples repeats some, with `weight` 0.
    """

    places: range  # of its samples in the order of the epoch
    weight: float  # for the gradient of this rank's mean loss; see `BatchPlan.split_batch`
    total: int  # samples in the global batch
    ends_step: bool  # whether it is the last micro-batch before the optimizer's step
    ends_epoch: bool  # whether it is of the epoch's last step


# The micro-batch between two epochs, and at any time of a script that has no loader of the run.
NO_BATCH = MicroBatch(range(0), weight=1.0, total=0, ends_step=True, ends_epoch=False)


@dataclass(frozen=True)
class BatchPlan:
    """The cut of an epoch into global batches of `size` samples, one for each optimizer step, and
    of these into the micro-batches of one rank.

    A rank has its part of a global batch in at most `accumulate` micro-batches: at the tail of an
    epoch in fewer, on every rank in the same number. With `drop_last` an incomplete global batch is
    left out. With `even` all ranks have equally many samples in each micro-batch: of a global batch
    the remainder, fewer than `world_size` samples, is left out; a global batch of fewer samples
    than that goes to all ranks as a whole. `rank` and `world_size` count data parallel ranks.
    """

    size: int
    rank: int
    world_size: int
    accumulate: int = 1
    drop_last: bool = False
    even: bool = False

    @property
    def batch_size(self) -> int:
        """The most samples in a micro-batch."""
        return _ceil(_ceil(self.size, self.world_size), self.accumulate)

    def steps(self, samples: int) -> int:
        """Return the number of steps of an epoch of `samples` samples, the same on every rank."""
        return samples // self.size if self.drop_last else _ceil(samples, self.size)

    def steps_from(self, start: int, samples: int) -> int:
        """Return the number of steps that are left from place `start` of an epoch of `samples`
        samples. If `start` is no multiple of `size`, since earlier steps had another size, an
        incomplete last batch counts as a step, with `drop_last`, too."""
        remaining = samples - start
        return _ceil(remaining, self.size) if start % self.size else self.steps(remaining)

    def micro_batches(self, samples: int, start: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches from place `start`, at which a global batch begins, to
        the end of an epoch of `samples` samples; none where no step is left."""
        stop = min(start + self.steps_from(start, samples) * self.size, samples)
        for first in range(start, stop, self.size):
            block = range(first, min(first + self.size, stop))
            yield from self.split_batch(block, ends_epoch=block.stop == stop)

    def split_batch(self, block: range, ends_epoch: bool) -> list[MicroBatch]:
        """Return this rank's micro-batches, in order, of one global batch. `block` has the batch's
        places in the epoch's order, at least one; `ends_epoch`: it is the epoch's last batch.

        DistributedDataParallel divides the sum of the ranks' gradients by the number of ranks. So
        the mean loss of a micro-batch of n samples gets the weight n * ranks / n_total, where
        n_total samples of the global batch are used. The result is the mean over these samples,
        however unevenly they are spread.
        """
        total = used = len(block)
        places = block[self.rank :: self.world_size]
        if self.even and total < self.world_size:
            places, used = block, total * self.world_size  # each sample counts once per rank
        elif self.even:
            used -= total % self.world_size
            places = places[: used // self.world_size]
        count = _ceil(_ceil(used, self.world_size), self.batch_size)
        repeated = block[:2]  # two, since batch norm refuses a single sample
        return [
            MicroBatch(
                places=part or repeated,
                weight=len(part) * self.world_size / used,
                total=total,
                ends_step=i == count - 1,
                ends_epoch=ends_epoch,
            )
            # Every count-th one, so that no piece is much smaller than the others.
            for i, part in enumerate(places[i::count] for i in range(count))
        ]


def make_plan(
    batch_size: int | None,
    global_batch_size: int | None,
    accumulate: int,
    rank: int,
    world_size: int,
    drop_last: bool = False,
    even: bool = False,
) -> BatchPlan:
    """Return the plan of data parallel rank `rank` for `batch_size` samples per rank and
    micro-batch, or for `global_batch_size` samples of all ranks together per step.

    `accumulate` counts micro-batches per step; `drop_last` and `even` as `BatchPlan` has them.

    Raises
    ------
    UsageError
        neither size is set, or both are; or a size or `accumulate` is no int, or below 1
    """
    if (batch_size is None) == (global_batch_size is None):
        which = "neither" if batch_size is None else "both"
        raise UsageError(
            f"{which} of batch_size and global_batch_size given; accepted: one of them",
            hint="batch_size counts samples per rank, global_batch_size those of all ranks",
        )
    sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
    for name, number in {**sizes, "accumulate": accumulate}.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise UsageError(f"{name} is {number!r}; accepted: a whole number from 1")
    size = global_batch_size or (batch_size or 0) * accumulate * world_size
    return BatchPlan(size, rank, world_size, accumulate, drop_last, even)


def _ceil(number: int, divisor: int) -> int:
    """Return a quotient, rounded up."""
    return -(-number // divisor)


def derive_seed(*parts: int) -> int:
    """Return a seed of 63 bits that depends on all of the integers; similar integers give unrelated
    seeds."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes signed seeds of 64 bits


def permutation(samples: int, seed: int, epoch: int) -> torch.Tensor | FormulaOrder:
    """Return the random order of an epoch's samples: the index of the sample at each place. A slice
    of it is an integer tensor.

    Up to `LISTED` samples torch draws it as a list, int32; for more samples it is a `FormulaOrder`.
    Global generators stay as they are.
    """
    if samples > LISTED:
        return FormulaOrder(samples, seed, epoch)
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    return torch.randperm(samples, generator=generator, dtype=torch.int32, device="cpu")


class FormulaOrder:
    """A permutation of 0 … samples - 1 that needs no memory: any place of it is calculated.

    A list of 10^9 samples would take 4 GB on each rank, and a minute at each start. This is a
    Feistel network on the smallest even number of bits that has room for all samples, as in format-
    preserving encryption (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002): a result
    that is no sample's number goes through the network again, until it is one.
    """

    ROUNDS = 6

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        self._samples = samples
        self._half = max(1, ((samples - 1).bit_length() + 1) // 2)  # bits
        self._keys = [derive_seed(seed, epoch, number) for number in range(self.ROUNDS)]

    def __getitem__(self, places: slice) -> torch.Tensor:
        """Return the indices of the samples at a slice of places, int64 of shape (places,)."""
        samples = self._mix(torch.arange(*places.indices(self._samples), device="cpu"))
        while (strays := samples >= self._samples).any():
            samples[strays] = self._mix(samples[strays])
        return samples

    def _mix(self, places: torch.Tensor) -> torch.Tensor:
        """Return the number that the network makes of each place; it may be too large for a
        sample's. Different places give different numbers."""
        mask = (1 << self._half) - 1
        high, low = places >> self._half, places & mask
        for key in self._keys:
            word = (low ^ key) * ODD  # overflows, as is intended
            word = (word ^ (word >> 29)) * ODD  # the high bits, which are mixed best, reach the low
            high, low = low, high ^ ((word >> 32) & mask)
        return (high << self._half) | low
