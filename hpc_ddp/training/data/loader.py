"""The loaders of a run: its batches on the device, and where it is in them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.data import batch_plan
from hpc_ddp.training.data.batch_plan import NO_BATCH, BatchPlan, MicroBatch, Position
from hpc_ddp.training.data.batches import move_to_device
from hpc_ddp.training.data.dataloader import make_dataloader
from hpc_ddp.training.data.iteration import BatchGroups, Iteration, is_at_for
from hpc_ddp.training.data.sample_seeds import SampleSeeds
from hpc_ddp.training.data.worker_death import iterate_watched
from hpc_ddp.training.process.hang_watchdog import beat


@dataclass
class Batch:
    """The batch that the training loop is at."""

    micro_batch: MicroBatch = NO_BATCH
    end: int = 0  # the place behind its global batch: the position once its step is done
    is_trained: bool = False  # whether its step is done


class Loader:
    """Yields this rank's micro-batches of the current epoch, from the current position on.

    `Run.loader` makes it. Batches are on the run's device; `batch` is the one last yielded in the
    epoch. A batch counts once its step is done (`count_batch`): `position`, which is the run's,
    then moves behind it. So a look at some batches (a *peek*: an iteration that is closed before a
    step, or that is opened while another one is open) changes nothing. `samples` is the size of the
    data set, None for a stream.

    The loader calls `check_batch` before each batch of an iteration but its first, `set_sync`
    before each micro-batch with whether the micro-batch ends a step, and `end_batch` when the loop
    asks for another batch; `time_batches` wraps the batches. With `rolls` the end of an epoch
    begins the next one.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: BatchPlan,
        *,
        seed: int,
        position: Position,
        device: torch.device,
        check_batch: Callable[[], None],
        set_sync: Callable[[bool], None],
        end_batch: Callable[[], None],
        time_batches: Callable[[Iterator[Any]], Iterator[Any]] = iter,
        warn: Callable[[str], None] | None = None,
        shuffle: bool | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of `make_dataloader`; `shuffle` None shuffles every data set but a
        stream. `warn` is set on one rank, and called with a text for the user where a resume would
        do something else than this run does, or `even` leaves samples out.

        Raise UsageError for refused options and for a data set too small for one step, TypeError
        for a map-style data set without a length.
        """
        self.dataset, self.batch_size = dataset, plan.batch_size  # as torch's loader has them
        self.samples = size_of(dataset)
        self.rolls, self.is_watched = False, True  # `is_watched`: as `StatefulLoaders` have it
        self.groups = BatchGroups(plan.accumulate)
        # Called once, before the epoch's first batch. It returns a function that undoes the call,
        # for a peek.
        self.on_first_batch: Callable[[], Callable[[], None]] | None = None
        self.clear()
        self.is_before_loop = False  # while True, before the first loop, peeks see epoch 0
        self._plan, self._position, self._device = plan, position, device
        self._check_batch, self._set_sync, self._end_batch = check_batch, set_sync, end_batch
        self._time_batches = time_batches
        if self.samples is not None and not plan.steps(self.samples):
            raise UsageError(
                f"the training set has {self.samples} samples; accepted: enough for one step"
                f" of {plan.size}",
                hint="take a smaller batch size, or no drop_last",
            )
        if warn and plan.even and plan.size % plan.world_size:
            warn(
                f"even=True leaves out {plan.size % plan.world_size} of the {plan.size} samples of"
                f" each step on {plan.world_size} ranks; a multiple of their number leaves none"
            )
        if shuffle is None:
            shuffle = self.samples is not None
        self._shuffle = shuffle
        options = {"device": device, "shuffle": shuffle, **options}
        self._batches = make_dataloader(dataset, plan, seed, position, **options)
        self._warn = warn
        source: Any = self._batches.dataset
        self._seeds: SampleSeeds = source.seeds
        self._seeds.warns = warn is not None
        # A peek has a DataLoader of its own: for a second iterator of one whose workers persist,
        # torch would begin the loop's iteration anew.
        if "persistent_workers" in options:
            options["persistent_workers"] = False
        self._make_peek = partial(make_dataloader, dataset, plan, seed, **options)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch; raise UnknownLengthError for a stream."""
        return self._plan.steps(known_size(self.samples))

    @property
    def facts(self) -> dict[str, Any]:
        """The values that, besides the seed, decide the order of the samples, by their names in
        messages. `track` compares them with the checkpoint's."""
        facts: dict[str, Any] = {"size of the training set": self.samples, "shuffle": self._shuffle}
        if self._shuffle and (self.samples or 0) > batch_plan.LISTED:
            facts["order"] = "by formula"  # which older checkpoints of so many samples lack
        return facts

    def steps(self, start: int) -> int | None:
        """Return the number of steps from place `start` (in samples) to the end of an epoch, None
        for a stream."""
        return None if self.samples is None else self._plan.steps_from(start, self.samples)

    def has_left(self, steps: int) -> bool:
        """Return whether the run's epoch has exactly this many steps left; False for a stream."""
        return self.steps(self._position.samples) == steps

    def total_steps(self, epochs: int) -> int | None:
        """Return the number of steps, done and left, of a run of `epochs` epochs; None for a
        stream."""
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
        """Note that the present batch's step is done, and move the run's position behind the batch.
        Warn of a script that takes other groups of batches for its steps than `accumulate` says,
        unless the loader has warned before."""
        self._position.samples, self._position.passes = self.batch.end, self._passes
        self.batch.is_trained = True
        if (text := self.groups.end_step()) and self._warn:
            self._warn(f"WARNING: {text}")
            self._warn = None

    @property
    def is_epoch_done(self) -> bool:
        """Whether all batches of the run's epoch are done. True as a loop begins where the script
        has left the last loop by ``break`` after the epoch's last batch, and saved: the caller then
        calls `begin_epoch`."""
        if self.samples is None:
            return self._position.has_ended
        return self.has_left(0)

    @property
    def is_earlier_pass(self) -> bool:
        """Whether the pass over the loader that is open now has a lower number, in its epoch, than
        the pass in which the run's last step was. After a resume such a pass only repeats batches
        that are done."""
        return self._passes < self._position.passes

    def begin_loop(self) -> None:
        """Forget the present batch and all open iterations: the script begins a loop."""
        self.is_before_loop = False
        self.clear()

    def clear(self) -> bool:
        """Forget the present batch and all open iterations, also a peek whose iterator the script
        keeps: a loop begins, or is between two epochs. Drop `on_first_batch`, and return whether
        one was set that was not called."""
        self.batch = Batch(is_trained=True)
        self.groups.clear()
        self._passes = 0
        self._open: set[Iteration] = set()
        is_unused, self.on_first_batch = self.on_first_batch is not None, None
        return is_unused

    def __iter__(self) -> Iterator[Any]:
        """Yield batches on the device, from the run's position on. In an epoch that is done, only
        the epoch's first batch can be taken, by a peek. With `rolls` the run's position moves on to
        the next epoch at the end of this one.

        Each yielded batch becomes the present `batch`; once a peek is closed, `batch` is again the
        one from before the peek. Raise UsageError for a second batch outside of a run's loop, for a
        batch in the loop by an iterator that was begun before it, for a second batch in an epoch
        that is done, for a body of ``run.steps`` that takes too many micro-batches, and for a data
        set whose size has changed; HpcDdpError for a loader worker that died. Errors of the data
        set, of `check_batch` and of `end_batch` come through.
        """
        check_size(size_of(self.dataset), self.samples)
        if self._warn and self._batches.persistent_workers:
            self._seeds.warn_of_copies(self._warn)
        iteration, batches, end = self._begin_iteration(is_at_for(sys._getframe(1)))
        before = self.batch
        current: Batch | None = None
        try:
            source = iterate_watched(batches, iteration.begin)
            for micro_batch, content in self._time_batches(source):
                self._open.add(iteration)  # again: at an epoch's end `clear` empties the set
                if current:
                    self._check_batch()
                    check_begun(iteration.is_early)
                    check_not_done(iteration.is_done)
                if not (iteration.is_peek or iteration.is_early or iteration.is_done):
                    self._check_step_is_done()
                end += micro_batch.total if micro_batch.ends_step else 0
                self.batch = current = Batch(micro_batch, end, is_trained=iteration.is_done)
                self._set_sync(micro_batch.ends_step)
                beat()
                iteration.add_batch(current)
                self._seeds.warns = False  # in loader workers that start later, too
                yield move_to_device(content, self._device)
                self._share_step(current, iteration.is_peek and not iteration.is_done)
                self.batch = current  # a peek during the yield has set another one
                if not iteration.is_done:
                    self._end_batch()
            self._end_pass(iteration)
        except GeneratorExit:  # the script has closed the iteration, or dropped its iterator
            if self.batch is current and (iteration.is_done or not current.is_trained):
                self.batch = before
                self._set_sync(before.micro_batch.ends_step)
                iteration.end()
            raise
        finally:
            self._open.discard(iteration)

    def _check_step_is_done(self) -> None:
        """Raise UsageError where a body of ``run.steps`` asks for more micro-batches than its step
        has, as at the end of an epoch, where there may be fewer: their gradients would mix."""
        micro_batch, count = self.batch.micro_batch, self._plan.accumulate
        is_last = micro_batch.ends_step and micro_batch is not NO_BATCH
        if self.rolls and count > 1 and is_last and not self.batch.is_trained:
            raise UsageError(
                "a body of run.steps has taken more micro-batches than its step has; accepted:"
                " those up to run.ends_step, for an epoch's last step may have fewer than"
                f" accumulate={count}",
                hint="while True: batch = next(batches); …; if run.ends_step: break",
            )

    def _begin_iteration(self, by_loop: bool) -> tuple[Iteration, DataLoader[Any], int]:
        """Open a new iteration; return it, its batches, and the place (in samples) at which they
        begin. An iteration that is no peek counts as a pass of the epoch; with `rolls` it begins
        the next epoch if this one is done. `by_loop` is explained in `Iteration`."""
        self._end_kept_peeks(by_loop)
        is_early = self.is_before_loop
        is_peek = is_early or bool(self._open)
        self._passes += not is_peek
        if self.rolls and not is_peek and self.has_left(0):
            self._position.begin_epoch()
        is_done = not is_early and self.has_left(0)
        position = Position(epoch=self._position.epoch) if is_done else self._position
        position = Position() if is_early else position  # the same batch in each attempt
        batches = self._make_peek(position=position) if is_peek or is_done else self._batches
        iteration = Iteration(self, by_loop, is_peek=is_peek, is_early=is_early, is_done=is_done)
        self._open.add(iteration)
        return iteration, batches, position.samples

    def _end_pass(self, iteration: Iteration) -> None:
        """End an iteration after its last batch. Note that a stream's epoch has ended, if a batch
        had its step. With `rolls` begin the next epoch, unless this was a peek without a step, or
        the epoch was done before."""
        iteration.end()
        trains = not iteration.is_done and (iteration.has_step or not iteration.is_peek)
        self._position.has_ended |= self.samples is None and trains and iteration.has_step
        if self.rolls and trains:
            self._position.begin_epoch()

    def _end_kept_peeks(self, by_loop: bool) -> None:
        """If the iteration about to begin is `by_loop`, end the open peeks whose iterators the
        script keeps: iterations by ``next`` that had no step."""
        for iteration in [*self._open]:
            if by_loop and not (iteration.by_loop or iteration.has_step):
                iteration.end()
                self._open.discard(iteration)

    def _share_step(self, current: Batch, is_peek: bool) -> None:
        """Called before the batch after `current` is fetched. If meanwhile another iteration has
        set the present batch, and the step was counted for that batch, mark `current` as trained,
        too. Warn of this, and of a step with a batch of a peek (`is_peek`), unless the loader has
        warned before."""
        present = self.batch
        is_trained = present.is_trained and present.micro_batch is not NO_BATCH
        is_late = present is not current and is_trained and not current.is_trained
        if self._warn and (is_late or (is_peek and current.is_trained)):
            self._warn(
                "WARNING: an iterator of the training loader is kept while another one goes on, as"
                " by `it = iter(loader)`: a resume in this epoch goes on with other random numbers;"
                " accepted for a look: next(iter(loader))"
            )
            self._warn = None
        current.is_trained |= is_late


class Shard:
    """This rank's part of a data set, in order, each sample on one rank only: for evaluation.

    `Run.shard` makes it. Nothing is padded, so ranks may have different numbers of batches, or
    none: call nothing collective per batch, and add the sums up afterwards with `Run.sum`. With
    `even` they have the same number; `counts` is False while the yielded batch only fills up: its
    samples are another rank's.
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
        """`options` are those of `make_dataloader`. Raise UsageError for those that it refuses, and
        for ``shuffle`` and ``drop_last``; TypeError for a map-style data set without a length."""
        self.dataset, self.batch_size = dataset, plan.batch_size  # as torch's loader has them
        self.counts, self._even = True, even
        if options.pop("shuffle", False) or options.pop("drop_last", False):
            raise UsageError("a shard has every sample once, in order: no shuffle, no drop_last")
        self._samples, self._plan, self._device = size_of(dataset), plan, device
        self._batches = make_dataloader(dataset, plan, seed, Position(), device, False, **options)

    def __len__(self) -> int:
        """Return the number of batches that this rank yields; raise UnknownLengthError for a
        stream."""
        if self._even:
            return self._plan.steps(known_size(self._samples))
        numbers = range(self._plan.rank, known_size(self._samples), self._plan.world_size)
        return len(numbers[:: self._plan.batch_size])  # the first sample of each batch

    def __iter__(self) -> Iterator[Any]:
        """Yield batches on the device, and set `counts` for each of them. Raise HpcDdpError for a
        loader worker that died; errors of the data set come through."""
        for micro_batch, batch in iterate_watched(self._batches):
            beat()
            self.counts = micro_batch.weight > 0
            if self.counts or self._even:
                yield move_to_device(batch, self._device)


def check_size(samples: int | None, first_samples: int | None) -> None:
    """Raise UsageError for a data set that has grown or shrunk since its loader was made (None: a
    stream): the order of the samples, and a resume, depend on their number."""
    if samples != first_samples:
        raise UsageError(
            f"the training set has {samples} samples, and had {first_samples} as run.loader was"
            " called; accepted: the same number",
            hint="batches of your own in run.steps, or a run for each stage",
        )


def check_begun(is_early: bool) -> None:
    """Raise UsageError, if `is_early`, for a batch in a loop from an iteration that was begun
    before the loop."""
    if is_early:
        raise UsageError(
            "an iterator of the training loader was begun before the loop, and goes on in it; the"
            " loop's first batch would be left out",
            hint="for a look `next(iter(loader))`, and iter(loader) anew in the loop",
        )


def check_not_done(is_done: bool) -> None:
    """Raise UsageError for another batch of an epoch that is done."""
    if is_done:
        raise UsageError(
            "the training loader was iterated again in an epoch whose batches are all taken",
            hint="iterate it once in each epoch; for another pass take run.shard",
        )


class UnknownLengthError(UsageError, TypeError):
    """Raised for the length of a stream. It is a TypeError, too, for which `list` and tqdm go on
    without a length."""


def size_of(dataset: Dataset[Any]) -> int | None:
    """Return the number of samples of a data set; None for a stream, also for one with a length.
    Raise TypeError for a map-style data set without a length."""
    return None if isinstance(dataset, IterableDataset) else len(dataset)  # type: ignore[arg-type]


def known_size(samples: int | None) -> int:
    """Return `samples`, the size of a data set; raise UnknownLengthError for a stream's, None."""
    if samples is None:
        raise UnknownLengthError(
            "the length of an iterable data set is not known before its end",
            hint="give the scheduler a number of steps of your own",
        )
    return samples
