"""The loaders of a run: the batches of `order`, through torch's DataLoader."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from hpc_ddp.training.data.batches import pinned, rows_of, to_device
from hpc_ddp.training.data.call_order import check_size
from hpc_ddp.training.data.iterable import IterableBatches
from hpc_ddp.training.data.order import NO_BATCH, BatchPlan, MicroBatch, Position
from hpc_ddp.training.data.worker_death import watched
from hpc_ddp.training.devices import is_accelerator
from hpc_ddp.training.models import rng
from hpc_ddp.training.process.hang_watchdog import beat


@dataclass
class Batch:
    """The batch that the training loop is at."""

    micro_batch: MicroBatch = NO_BATCH
    end: int = 0  # its global batch's last place in the epoch, and one: the position after its step
    is_trained: bool = False  # whether its step is done


class Loader:
    """Yields this rank's micro-batches of the current epoch, from the current position on.

    Made by `Run.loader`. Batches are on the run's device; `batch` is the one last yielded in the
    epoch. A batch counts from its step on (`count_batch`), so a look at some of them (a *peek*: an
    iteration that is closed before a step, or is opened in the midst of another) changes nothing.
    `samples` is the size of the data set, None for a stream. `check` is called before a second
    batch, `sync` before each micro-batch with whether it ends a step, `batch_done` when the loop
    asks for another one; `timed` wraps the batches. With `rolls` an epoch's end begins the next
    one.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: BatchPlan,
        *,
        seed: int,
        position: Position,
        device: torch.device,
        check: Callable[[], None],
        sync: Callable[[bool], None],
        batch_done: Callable[[], None],
        timed: Callable[[Iterator[Any]], Iterator[Any]] = iter,
        shuffle: bool | None = None,
        **options: Any,
    ) -> None:
        """Take the options of `batches_of`; `shuffle` None shuffles all data sets but a stream.

        Raise UsageError for refused options, and a data set too small for one step, TypeError for
        a map-style one without a length.
        """
        self.dataset, self.batch_size = dataset, plan.batch_size  # as torch's loader has them
        self.samples = size_of(dataset)
        self.rolls = False
        self.end_epoch()
        self._open = 0  # iterations that have not ended
        self._plan, self._position, self._device = plan, position, device
        self._check, self._sync, self._batch_done, self._timed = check, sync, batch_done, timed
        if self.samples is not None and not plan.steps(self.samples):
            raise UsageError(
                f"the training set has {self.samples} samples; accepted: enough for one step"
                f" of {plan.size}",
                hint="take a smaller batch size, or no drop_last",
            )
        if shuffle is None:
            shuffle = self.samples is not None
        self._shuffle = shuffle
        make = partial(batches_of, dataset, plan, seed, device=device, shuffle=shuffle, **options)
        self._batches = make(position=position)
        # torch would begin the loop's own iteration anew where its workers persist.
        fresh = {"persistent_workers": False} if "persistent_workers" in options else {}
        self._make_peek = partial(make, **fresh)

    def __len__(self) -> int:
        """Optimizer steps of a whole epoch, wherever in it the run is (for a scheduler).

        Raise UnknownLengthError for a stream.
        """
        return self._plan.steps(known_size(self.samples))

    @property
    def facts(self) -> dict[str, Any]:
        """The values that decide the order of the samples beside the seed, for a resume."""
        facts: dict[str, Any] = {"size of the training set": self.samples, "shuffle": self._shuffle}
        if self._shuffle and (self.samples or 0) > order.LISTED:
            facts["order"] = "by formula"  # which older checkpoints of so many samples lack
        return facts

    def steps(self, start: int) -> int | None:
        """Return the steps from place `start` (in samples) to the end of an epoch, None for a
        stream."""
        return None if self.samples is None else self._plan.steps(self.samples - start)

    def total_steps(self, epochs: int) -> int | None:
        """Return the steps of a whole run of some epochs, None for a stream."""
        steps_left = self.steps(self._position.samples)
        if steps_left is None:
            return None
        later_epochs = epochs - self._position.epoch - 1
        return self._position.step + steps_left + later_epochs * len(self)

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch last yielded in the epoch."""
        return self.batch.micro_batch

    def count_batch(self) -> None:
        """Move the run's position behind the present batch, whose step is done."""
        self._position.samples = self.batch.end
        self.batch.is_trained = True

    def end_epoch(self) -> None:
        """Forget the present batch: the loop is between two epochs."""
        self.batch = Batch(is_trained=True)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches on the device, from the run's position on; of an epoch that is done only
        the first one, for a peek.

        Each becomes the present `batch`, until a peek is closed: then the one before is it again.
        Raise UsageError for a second batch outside of a run's loop, or in an epoch that is done,
        and for a data set of another size than at first, HpcDdpError for a loader worker that died;
        errors of the data set come through, and what `batch_done` raises.
        """
        check_size(size_of(self.dataset), self.samples)
        before, is_peek = self.batch, self._open > 0
        if self.rolls and not is_peek and self.steps(self._position.samples) == 0:
            self._position.begin_epoch()
        is_done = self.steps(self._position.samples) == 0
        position = Position(epoch=self._position.epoch) if is_done else self._position
        batches = self._make_peek(position=position) if is_peek or is_done else self._batches
        end = position.samples
        current: Batch | None = None
        self._open += 1
        try:
            for micro_batch, content in self._timed(watched(batches)):
                if current:
                    self._check()
                    check_not_done(is_done)
                end += micro_batch.total if micro_batch.ends_step else 0
                self.batch = current = Batch(micro_batch, end, is_trained=is_done)
                self._sync(micro_batch.ends_step)
                beat()
                yield to_device(content, self._device)
                self.batch = current  # a peek has one of its own
                if not is_done:
                    self._batch_done()
            if self.rolls and not is_peek:
                self._position.begin_epoch()
        except GeneratorExit:
            if self.batch is current and (is_done or not current.is_trained):
                self.batch = before
                self._sync(before.micro_batch.ends_step)
            raise
        finally:
            self._open -= 1


class Shard:
    """This rank's part of a data set, in order, each sample on one rank only: for evaluation.

    Made by `Run.shard`. Nothing is padded, so ranks may have different numbers of batches, or
    none: call nothing collective per batch, and add the sums up afterwards with `Run.sum`. With
    `even` they have the same number; `counts` is false while a batch is one of those that only
    fill up, whose samples are another rank's.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: BatchPlan,
        *,
        seed: int,
        device: torch.device,
        even: bool = False,
        **options: Any,
    ) -> None:
        """Take the options of `batches_of`; raise UsageError for those that a shard can't have,
        TypeError for a map-style data set without a length."""
        self.dataset, self.batch_size = dataset, plan.batch_size  # as torch's loader has them
        self.counts, self._even = True, even
        if options.pop("shuffle", False) or options.pop("drop_last", False):
            raise UsageError("a shard has every sample once, in order: no shuffle, no drop_last")
        self._samples, self._plan, self._device = size_of(dataset), plan, device
        self._batches = batches_of(dataset, plan, seed, Position(), device, False, **options)

    def __len__(self) -> int:
        """Return the number of batches that this rank yields; raise UnknownLengthError for a
        stream."""
        if self._even:
            return self._plan.steps(known_size(self._samples))
        numbers = range(self._plan.rank, known_size(self._samples), self._plan.world_size)
        return len(numbers[:: self._plan.batch_size])

    def __iter__(self) -> Iterator[Any]:
        """Yield batches on the device, and set `counts` for each of them.

        Raise HpcDdpError for a loader worker that died; errors of the data set come through.
        """
        for micro_batch, batch in watched(self._batches):
            beat()
            self.counts = micro_batch.weight > 0
            if self.counts or self._even:
                yield to_device(batch, self._device)


def check_not_done(is_done: bool) -> None:
    """Raise UsageError for another batch of an epoch that is done."""
    if is_done:
        raise UsageError(
            "the training loader was iterated again in an epoch whose batches are all taken",
            hint="iterate it once in each epoch; for another pass take run.shard",
        )


class UnknownLengthError(UsageError, TypeError):
    """A stream has no length. A TypeError, so that `list` and tqdm do without."""


def size_of(dataset: Dataset[Any]) -> int | None:
    """Return the number of samples; None for a stream, which need not know it. Raise TypeError for
    a map-style data set without a length."""
    return None if isinstance(dataset, IterableDataset) else len(dataset)  # type: ignore[arg-type]


def known_size(samples: int | None) -> int:
    """Return `samples`, the size of a data set; raise UnknownLengthError for a stream's, None."""
    if samples is None:
        raise UnknownLengthError(
            "the length of an iterable data set is not known before its end",
            hint="give the scheduler a number of steps of your own",
        )
    return samples


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
    """Return torch's loader, of which each iteration yields the rest of the epoch from `position`
    on, where that is by then, as `_Batch`es: not moved to `device`, but pinned for an accelerator.
    `options` are DataLoader's; raise UsageError for one that the run or a stream can't have, or
    that torch refuses."""
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
            worker_init_fn=worker_init_fn,
            in_order=True,
            generator=torch.Generator(),  # else an iterator draws from the global one
            **{"pin_memory": is_accelerator(device), **options},
        )
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"torch's DataLoader refuses the options: {error}", hint="see torch.utils.data"
        ) from None


def _may_fork() -> bool:
    """Return whether loader workers are forked: unless the script has set a start method.

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

    Neither the number of ranks or loader workers nor an interruption changes what an
    augmentation draws, and it takes nothing from the generators of the training itself.
    `collate` has a seed of its own for each batch.
    """

    def __init__(
        self, dataset: Dataset[Any], seed: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate
        self._is_of_tensors = type(dataset) is TensorDataset and collate is default_collate

    def __getitem__(self, key: tuple[int, list[int], MicroBatch]) -> tuple[MicroBatch, Any]:
        """Return the batch of a key of `_Keys`; errors of the data set and of `collate` come
        through."""
        epoch, indices, micro_batch = key
        if self._is_of_tensors:  # nothing is drawn, so all come at once
            tensors = self._dataset.tensors  # type: ignore[attr-defined]  # others by now, perhaps
            return micro_batch, [rows_of(tensor, indices) for tensor in tensors]
        if get_worker_info() is not None:
            return micro_batch, self._batch(epoch, indices)
        with rng.untouched():
            return micro_batch, self._batch(epoch, indices)

    def _batch(self, epoch: int, indices: list[int]) -> Any:
        """Return the collated samples of an epoch at some indices; changes the global
        generators."""
        samples = [self._sample(epoch, index) for index in indices]
        rng.seed_all(order.derive(self._seed, epoch, indices[0], len(indices)))
        return self._collate(samples)

    def _sample(self, epoch: int, index: int) -> Any:
        """Seed the global generators for this sample, and return it."""
        rng.seed_all(order.derive(self._seed, epoch, index))
        return self._dataset[index]


class _Batch:
    """A batch and its micro-batch, which DataLoader's thread pins by its own method.

    Not by torch's, which leaves dataclasses alone, and fails for a tensor that is on a device.
    """

    def __init__(self, micro_batch: MicroBatch, content: Any) -> None:
        self.micro_batch, self.content = micro_batch, content

    def pin_memory(self, device: object = None) -> _Batch:
        return _Batch(self.micro_batch, pinned(self.content))


def _as_batch(pair: Any) -> _Batch:
    return _Batch(*pair)
