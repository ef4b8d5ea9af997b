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
from hpc_ddp.training.data import order
from hpc_ddp.training.data.batches import pinned, rows_of
from hpc_ddp.training.data.iterable import IterableBatches
from hpc_ddp.training.data.order import BatchPlan, MicroBatch, Position
from hpc_ddp.training.data.sample_seeds import SampleSeeds
from hpc_ddp.training.devices import is_accelerator
from hpc_ddp.training.models import rng


def batches_of(
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
    """Return torch's loader. Each iteration yields, as `_Batch`es, the rest of the epoch from where
    `position` is when the iteration begins. The batches stay on the host, pinned if `device` is an
    accelerator. `options` are DataLoader's; raise UsageError for one that the run or a stream can't
    have, or that torch refuses."""
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
        source = Seeded(dataset, seed, collate)
        options["sampler"] = _Keys(len(dataset), plan, seed, position, shuffle)  # type: ignore[arg-type]
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
            # Its own, or an iterator would draw from the global one; workers' seeds are of it.
            generator=torch.Generator().manual_seed(order.derive(seed, plan.rank)),
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
    object.__setattr__(worker, "dataset", worker.dataset.dataset)  # torch's own way refuses it
    init(number)


def _may_fork() -> bool:
    """Return whether loader workers are to be forked: the script has set no start method, and the
    system can fork.

    Python 3.14 starts processes by a server that imports the script again, and torch with it, for
    each rank; and it pickles the data set. Older ones fork, and so do all under hpc-ddp.
    """
    is_set = multiprocessing.get_start_method(allow_none=True) is not None
    return not is_set and "fork" in multiprocessing.get_all_start_methods()


class _Keys:
    """The keys of batches, in order: (epoch, indices, micro-batch) from the current position on."""

    def __init__(
        self, samples: int, plan: BatchPlan, seed: int, position: Position, shuffle: bool
    ) -> None:
        self._samples, self._plan, self._seed = samples, plan, seed
        self._position, self._shuffle = position, shuffle

    def __iter__(self) -> Iterator[tuple[int, list[int], MicroBatch]]:
        """Yield the rest of the epoch; the permutation is made anew at each call."""
        epoch = self._position.epoch
        micro_batches = self._plan.micro_batches(self._samples, self._position.samples)
        if not self._shuffle:
            for micro_batch in micro_batches:
                yield epoch, list(micro_batch.places), micro_batch
            return
        sequence = order.permutation(self._samples, self._seed, epoch)
        for micro_batch in micro_batches:
            places = micro_batch.places
            yield epoch, sequence[places.start : places.stop : places.step].tolist(), micro_batch


class Seeded(Dataset[tuple[MicroBatch, Any]]):
    """Fetches batches whose randomness depends on (seed, epoch, index) and on nothing else.

    Neither the number of ranks or loader workers nor an interruption changes what an augmentation
    draws. Augmentations take nothing from the generators of the training itself. `collate` has a
    seed of its own for each batch.
    """

    def __init__(
        self, dataset: Dataset[Any], seed: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        self.dataset, self._seed, self._collate = dataset, seed, collate
        self.seeds = SampleSeeds(dataset, collate)
        self._is_of_tensors = type(dataset) is TensorDataset and collate is default_collate

    def __getitem__(self, key: tuple[int, list[int], MicroBatch]) -> tuple[MicroBatch, Any]:
        """Return the batch of a key of `_Keys`; errors of the data set and of `collate` come
        through."""
        epoch, indices, micro_batch = key
        if self._is_of_tensors:  # nothing is drawn, so all come at once
            tensors = self.dataset.tensors  # type: ignore[attr-defined]  # others by now, perhaps
            return micro_batch, [rows_of(tensor, indices) for tensor in tensors]
        guard = rng.untouched() if get_worker_info() is None else nullcontext()
        with guard:
            fetch_batch = partial(self._batch, epoch, indices)
            refetch_last = partial(self._sample, epoch, indices[-1])
            return micro_batch, self.seeds.fetch(epoch, fetch_batch, refetch_last)

    def _batch(self, epoch: int, indices: list[int]) -> Any:
        """Return the collated samples of an epoch at some indices; changes the global
        generators."""
        samples = [self._sample(epoch, index) for index in indices]
        rng.seed_all(order.derive(self._seed, epoch, indices[0], len(indices)))
        return self._collate(samples)

    def _sample(self, epoch: int, index: int) -> Any:
        """Seed the generators for this sample, and return it."""
        self.seeds.seed(order.derive(self._seed, epoch, index))
        return self.dataset[index]


class _Batch:
    """A batch's content and its micro-batch. DataLoader's thread pins it by its own `pin_memory`.

    torch's own way leaves dataclasses alone, and fails for a tensor that is on a device.
    """

    def __init__(self, micro_batch: MicroBatch, content: Any) -> None:
        self.micro_batch, self.content = micro_batch, content

    def pin_memory(self, device: object = None) -> _Batch:
        return _Batch(self.micro_batch, pinned(self.content))


def _as_batch(pair: Any) -> _Batch:
    return _Batch(*pair)
