"""Iterable data sets, cut as those with indices are: each sample once, on any number of ranks.

A stream has to be read to know its samples. So every rank, and every loader worker,
reads all of it and keeps its own part: exact, but as dear as reading everything everywhere. The
cure is a cheap stream: let it yield references (paths, offsets) and decode them in
``collate_fn``, and give it a ``skip``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.data import order
from hpc_ddp.training.data.order import BatchPlan, MicroBatch, Position
from hpc_ddp.training.data.sample_seeds import SampleSeeds
from hpc_ddp.training.models import rng

_END = object()


class IterableBatches(IterableDataset[tuple[MicroBatch, Any]]):
    """Yields batches of what is left of the epoch at `position`.

    Random numbers of the data set depend on (seed, epoch, number of the sample), and
    those of `collate` on the samples of the batch. Worker w of n makes the batches w, w + n, …,
    in which order torch's DataLoader puts them together again.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        plan: BatchPlan,
        seed: int,
        position: Position,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self.dataset, self._plan, self._seed = dataset, plan, seed
        self._position, self._collate = position, collate
        self.seeds = SampleSeeds(dataset, collate)
        self._worker: Any = None  # this loader worker, as torch has it; None in the rank itself

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this worker's pairs of micro-batch and collated samples, to the end of the epoch.

        The data set sees no loader worker: torch's ``get_worker_info`` is None from here on, but in
        `collate`. Errors of the data set and of `collate` come through.
        """
        worker = get_worker_info()
        turn, turns = (worker.id, worker.num_workers) if worker else (0, 1)
        self.seeds.warns &= turn == 0
        # The data set must not see the worker: many then yield only a part of themselves.
        torch_worker._worker_info, self._worker = None, worker
        number = count()
        for block, samples, ends_epoch in self._blocks():
            for micro_batch in self._plan.pieces(block, ends_epoch):
                if next(number) % turns == turn:
                    yield micro_batch, self._batch(micro_batch, samples)

    def _blocks(self) -> Iterator[tuple[range, dict[int, Any], bool]]:
        """Yield, for each global batch: its places, the samples of it that this rank may need, by
        place, and whether it is the epoch's last. The next global batch is read before one is
        yielded."""
        source, (block, samples) = self.seeds.fetch(self._position.epoch, self._begin)
        while self._plan.steps(len(block)):
            later, its_samples = self._read(source, block.stop)
            yield block, samples, not self._plan.steps(len(later))
            block, samples = later, its_samples

    def _begin(self) -> tuple[Iterator[Any], tuple[range, dict[int, Any]]]:
        """Open the stream, and read a global batch from the position on. Return the iterator over
        the rest of the stream, and what `_read` returns of the batch."""
        source = self._open()
        return source, self._read(source, self._position.samples)

    def _open(self) -> Iterator[Any]:
        """Return an iterator over the stream from the current position on, after a call of its
        ``set_epoch``. In a stream without ``skip`` the samples before the position are read and
        dropped. Raise UsageError for a ``skip`` that returns no rest."""
        epoch, start = self._position.epoch, self._position.samples
        stream: Any = self.dataset
        skips = start > 0 and callable(getattr(stream, "skip", None))
        with rng.untouched():
            self.seeds.seed(order.derive(self._seed, epoch))
            set_epoch(stream, epoch)
            if skips:
                stream = stream.skip(start)
                if not (hasattr(stream, "__iter__") or hasattr(stream, "__getitem__")):
                    raise UsageError(
                        f"{type(self.dataset).__name__}.skip({start}) has returned {stream!r:.80};"
                        " accepted: the rest of the data set, to iterate over",
                        hint="return it there, or give the method another name",
                    )
                set_epoch(stream, epoch)  # Hugging Face's returns one that has forgotten it
            source: Iterator[Any] = iter(stream)
            for number in range(0 if skips else start):
                self._next(source, number)
        return source

    def _read(self, source: Iterator[Any], first: int) -> tuple[range, dict[int, Any]]:
        """Read one global batch from place `first` on, a smaller one at the stream's end. Return
        its places, and the samples that this rank may need, by place."""
        plan, samples, number = self._plan, dict[int, Any](), first
        shared = plan.world_size if plan.even else 2  # of a rest, or to repeat
        with rng.untouched():
            while number < first + plan.size:
                sample = self._next(source, number)
                if sample is _END:
                    break
                offset = number - first
                if offset % plan.world_size == plan.rank or offset < shared:
                    samples[number] = sample
                number += 1
        return range(first, number), samples

    def _next(self, source: Iterator[Any], number: int) -> Any:
        """Return the sample at place `number`, drawn with a seed of its own; `_END` after the last.
        Changes the global generators."""
        self.seeds.seed(order.derive(self._seed, self._position.epoch, number))
        return next(source, _END)

    def _batch(self, micro_batch: MicroBatch, samples: dict[int, Any]) -> Any:
        """Return the collated samples of a micro-batch; `samples` are by place in the epoch."""
        with rng.untouched():
            places = micro_batch.places
            seed = order.derive(self._seed, self._position.epoch, places[0], len(places))
            rng.seed_all(seed)
            torch_worker._worker_info = self._worker  # a collator of Transformers asks for it
            try:
                return self._collate([samples[place] for place in places])
            finally:
                torch_worker._worker_info = None


def set_epoch(stream: Any, epoch: int) -> None:
    """Set the epoch of a stream or a sampler, if it has ``set_epoch``."""
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(epoch)
