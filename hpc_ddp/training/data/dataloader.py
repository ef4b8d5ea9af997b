"""Batches of a data set by the places of `order`, through torch's DataLoader."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.data import batch_plan
from hpc_ddp.training.data.batch_plan import BatchPlan, MicroBatch, Position
from hpc_ddp.training.data.batches import copy_rows, pin_tensors
from hpc_ddp.training.data.iterable import IterableBatches
from hpc_ddp.training.data.sample_seeds import SampleSeeds
from hpc_ddp.training.devices import is_accelerator
from hpc_ddp.training.models import rng


def make_dataloader(
    dataset: Dataset[Any],
    plan: BatchPlan,
    seed: int,
    position: Position,
    device: torch.device,
    shuffle: bool,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    **options: Any,
) -> DataLoader[_Batch]:
    """Return torch's loader of the micro-batches that `plan` gives this rank. Each iteration yields
    the rest of the epoch, as `_Batch`es, from where `position` is when the iteration begins.

    `seed` and the epoch decide the order, with `shuffle`, and the random numbers of each sample.
    The batches stay on the host, pinned if `device` is an accelerator. The keyword arguments are
    DataLoader's. Raise UsageError for an option that the run sets itself, that an iterable data set
    can't have (``persistent_workers``, `shuffle`), or that torch refuses; TypeError for a map-style
    data set without a length.
    """
    if refused := options.keys() & {"sampler", "batch_sampler", "generator", "in_order"}:
        raise UsageError(
            f"{min(refused)} was given; the run has its own, so that the order can be resumed",
            hint="choose or weight samples in the data set",
        )
    collate = collate_fn or default_collate
    source: Any
    if isinstance(dataset, IterableDataset):
        if shuffle or options.get("persistent_workers"):
            name = "shuffle" if shuffle else "persistent_workers"
            raise UsageError(
                f"{name} is True; accepted with an iterable data set: False",
                hint="let the data set shuffle itself; set_epoch(epoch) is called if it has that",
            )
        source = IterableBatches(dataset, plan, seed, position, collate)
    else:
        size = len(dataset)  # type: ignore[arg-type]
        source = SeededBatches(dataset, seed, collate)
        options["sampler"] = _Keys(size, plan, seed, position, shuffle)
    if num_workers and _may_fork():
        options.setdefault("multiprocessing_context", "fork")
    try:
        return DataLoader(
            source,
            batch_size=None,  # the source makes the batches
            collate_fn=_as_batch,
            num_workers=num_workers,
            worker_init_fn=partial(_init_worker, worker_init_fn) if worker_init_fn else None,
            in_order=True,
            # An iterator draws the seeds of its workers from it, and not from the global one.
            generator=torch.Generator().manual_seed(batch_plan.derive_seed(seed, plan.rank)),
            **{"pin_memory": is_accelerator(device), **options},
        )
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"torch's DataLoader refuses the options: {error}", hint="see torch.utils.data"
        ) from None


def _init_worker(init: Callable[[int], None], number: int) -> None:
    """Call the script's `init` of loader worker `number`. torch's ``get_worker_info().dataset`` is
    the script's data set from here on: `init` opens its files there, or gives it a generator."""
    worker: Any = get_worker_info()
    # torch's class refuses a plain assignment.
    object.__setattr__(worker, "dataset", worker.dataset.dataset)
    init(number)


def _may_fork() -> bool:
    """Return whether loader workers are to be forked: the script has set no start method, and the
    system can fork.

    Python forks by itself up to 3.13. From 3.14 on it would start a server for each rank, which
    imports the script again, and torch with it, and would pickle the data set.
    """
    is_set = multiprocessing.get_start_method(allow_none=True) is not None
    return not is_set and "fork" in multiprocessing.get_all_start_methods()


class _Keys:
    """The sampler of `SeededBatches`: an iterable of keys, each an epoch, the indices of samples,
    and their micro-batch. `samples` is the size of the data set."""

    def __init__(
        self, samples: int, plan: BatchPlan, seed: int, position: Position, shuffle: bool
    ) -> None:
        self._samples, self._plan, self._seed = samples, plan, seed
        self._position, self._shuffle = position, shuffle

    def __iter__(self) -> Iterator[tuple[int, list[int], MicroBatch]]:
        """Yield the keys of the rest of the epoch, from where the position is now."""
        epoch = self._position.epoch
        micro_batches = self._plan.micro_batches(self._samples, self._position.samples)
        if not self._shuffle:
            for micro_batch in micro_batches:
                yield epoch, list(micro_batch.places), micro_batch
            return
        sequence = batch_plan.permutation(self._samples, self._seed, epoch)
        for micro_batch in micro_batches:
            places = micro_batch.places
            yield epoch, sequence[places.start : places.stop : places.step].tolist(), micro_batch


class SeededBatches(Dataset[tuple[MicroBatch, Any]]):
    """A data set of batches: each sample's random numbers depend on (seed, epoch, index) only.

    So an augmentation draws the same on any number of ranks and loader workers, and after a resume;
    and it takes nothing from the generators of the training. `collate` is seeded for each batch, by
    the batch's first index and size. `seeds` is public for its warnings.
    """

    def __init__(
        self, dataset: Dataset[Any], seed: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        self.dataset, self._seed, self._collate = dataset, seed, collate
        self.seeds = SampleSeeds(dataset, collate)
        self._is_of_tensors = type(dataset) is TensorDataset and collate is default_collate

    def __getitem__(self, key: tuple[int, list[int], MicroBatch]) -> tuple[MicroBatch, Any]:
        """Return the micro-batch of a key of `_Keys`, and its collated samples. May print warnings
        (`SampleSeeds.fetch`). Errors of the data set and of `collate` come through."""
        epoch, indices, micro_batch = key
        if self._is_of_tensors:  # nothing is drawn, so all samples can be copied at once
            # Read at each batch, since the script may have replaced them.
            tensors = self.dataset.tensors  # type: ignore[attr-defined]
            return micro_batch, [copy_rows(tensor, indices) for tensor in tensors]
        # In the rank's own process the training draws from the same generators.
        guard = rng.preserve_generators() if get_worker_info() is None else nullcontext()
        with guard:
            fetch_batch = partial(self._fetch_batch, epoch, indices)
            refetch_last = partial(self._fetch_sample, epoch, indices[-1])
            return micro_batch, self.seeds.fetch(epoch, fetch_batch, refetch_last)

    def _fetch_batch(self, epoch: int, indices: list[int]) -> Any:
        """Return the collated samples of an epoch at `indices`. Seeds the global generators, and
        those of transforms."""
        samples = [self._fetch_sample(epoch, index) for index in indices]
        rng.seed_all(batch_plan.derive_seed(self._seed, epoch, indices[0], len(indices)))
        return self._collate(samples)

    def _fetch_sample(self, epoch: int, index: int) -> Any:
        """Seed the global generators, and those of transforms, for a sample; return the sample."""
        self.seeds.seed(batch_plan.derive_seed(self._seed, epoch, index))
        return self.dataset[index]


class _Batch:
    """The collated samples of a micro-batch, `content`, with the micro-batch.

    It has a `pin_memory`, which DataLoader's thread calls: torch's own would leave dataclasses
    alone, and fail for a tensor that is on a device.
    """

    def __init__(self, micro_batch: MicroBatch, content: Any) -> None:
        self.micro_batch, self.content = micro_batch, content

    def pin_memory(self, device: object = None) -> _Batch:
        """Return a batch whose content is pinned. torch passes a `device`, which is not used."""
        return _Batch(self.micro_batch, pin_tensors(self.content))


def _as_batch(pair: Any) -> _Batch:
    """Return the `_Batch` of a pair that the data set of batches has given."""
    return _Batch(*pair)
