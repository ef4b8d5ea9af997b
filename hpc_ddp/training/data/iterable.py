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
from hpc_ddp.training.data import batch_plan
from hpc_ddp.training.data.batch_plan import BatchPlan, MicroBatch, Position
from hpc_ddp.training.data.sample_seeds import SampleSeeds
from hpc_ddp.training.models import rng

_END = object()


class IterableBatches(IterableDataset[tuple[MicroBatch, Any]]):
    """Yields this rank's batches of the rest of the epoch at `position`.

    Random numbers of the data set depend on (seed, epoch, number of the sample) only, and those of
    `collate` on (seed, epoch, number of the batch's first sample, its size). Loader worker w of n
    makes the batches w, w + n, …; torch's DataLoader puts them together again in order. `seeds` is
    public for its warnings.
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

        The data set sees no loader worker: torch's ``get_worker_info()`` is None in this process
        from here on, except in `collate`. The first worker may print warnings (`SampleSeeds.fetch`,
        without a ``refetch_last``). Raise UsageError as `_open_stream`; errors of the data set and
        of `collate` come through.
        """
        worker = get_worker_info()
        turn, turns = (worker.id, worker.num_workers) if worker else (0, 1)
        self.seeds.warns &= turn == 0
        # Many data sets yield only a part of themselves in a loader worker.
        torch_worker._worker_info, self._worker = None, worker
        number = count()
        for block, samples, ends_epoch in self._read_blocks():
            for micro_batch in self._plan.split_batch(block, ends_epoch):
                if next(number) % turns == turn:
                    yield micro_batch, self._collate_batch(micro_batch, samples)

    def _read_blocks(self) -> Iterator[tuple[range, dict[int, Any], bool]]:
        """Yield for each global batch its places, the samples of it that this rank may need, by
        place, and whether it is the epoch's last batch. A batch is yielded after the next one is
        read, which shows whether it is the last."""
        source, (block, samples) = self.seeds.fetch(self._position.epoch, self._open_and_read)
        while self._plan.steps(len(block)):  # 0 for an empty one, with `drop_last` for a rest
            next_block, next_samples = self._read_block(source, block.stop)
            yield block, samples, not self._plan.steps(len(next_block))
            block, samples = next_block, next_samples

    def _open_and_read(self) -> tuple[Iterator[Any], tuple[range, dict[int, Any]]]:
        """Open the stream, and read a global batch from the position on. Return the iterator over
        the rest of the stream, and the batch as `_read_block` returns it."""
        source = self._open_stream()
        return source, self._read_block(source, self._position.samples)

    def _open_stream(self) -> Iterator[Any]:
        """Call the stream's ``set_epoch``, and return an iterator over the stream from the current
        position on. In a stream without ``skip`` the samples before the position are read and
        dropped. Raise UsageError for a ``skip`` that does not return a stream."""
        epoch, start = self._position.epoch, self._position.samples
        stream: Any = self.dataset
        skips = start > 0 and callable(getattr(stream, "skip", None))
        with rng.preserve_generators():
            self.seeds.seed(batch_plan.derive_seed(self._seed, epoch))
            set_epoch(stream, epoch)
            if skips:
                stream = stream.skip(start)
                if not (hasattr(stream, "__iter__") or hasattr(stream, "__getitem__")):
                    raise UsageError(
                        f"{type(self.dataset).__name__}.skip({start}) has returned {stream!r:.80};"
                        " accepted: the rest of the data set, to iterate over",
                        hint="return it there, or give the method another name",
                    )
                set_epoch(stream, epoch)  # again, since Hugging Face's new stream has no epoch
            source: Iterator[Any] = iter(stream)
            for number in range(0 if skips else start):
                self._next_sample(source, number)
        return source

    def _read_block(self, source: Iterator[Any], first: int) -> tuple[range, dict[int, Any]]:
        """Read one global batch from place `first` on, a smaller one at the stream's end, an empty
        one behind it. Return its places, and the samples that this rank may need, by place: the
        rank's own, and the first ones, which `BatchPlan.split_batch` may give to all ranks."""
        plan, samples, number = self._plan, dict[int, Any](), first
        # With `even` each rank gets a whole batch that has fewer samples than there are ranks;
        # else a rank without samples repeats the batch's first two.
        shared = plan.world_size if plan.even else 2
        with rng.preserve_generators():
            while number < first + plan.size:
                sample = self._next_sample(source, number)
                if sample is _END:
                    break
                offset = number - first
                if offset % plan.world_size == plan.rank or offset < shared:
                    samples[number] = sample
                number += 1
        return range(first, number), samples

    def _next_sample(self, source: Iterator[Any], number: int) -> Any:
        """Seed the global generators, and those of transforms, for the sample at place `number`,
        and return the sample; `_END` after the last one."""
        self.seeds.seed(batch_plan.derive_seed(self._seed, self._position.epoch, number))
        return next(source, _END)

    def _collate_batch(self, micro_batch: MicroBatch, samples: dict[int, Any]) -> Any:
        """Return the collated samples of a micro-batch; `samples` are by place in the epoch. For
        the time of `collate` torch's ``get_worker_info()`` shows the loader worker."""
        with rng.preserve_generators():
            places = micro_batch.places
            seed = batch_plan.derive_seed(self._seed, self._position.epoch, places[0], len(places))
            rng.seed_all(seed)
            # A collator of Transformers calls get_worker_info().
            torch_worker._worker_info = self._worker
            try:
                return self._collate([samples[place] for place in places])
            finally:
                torch_worker._worker_info = None


def set_epoch(stream: Any, epoch: int) -> None:
    """Set the epoch of a stream or a sampler, if it has ``set_epoch``."""
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(epoch)
