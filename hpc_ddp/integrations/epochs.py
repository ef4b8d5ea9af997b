"""`EpochStop` is a `StopPoint` for a loop over epochs and their batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.stop_point import StopPoint
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.tracked_objects import warn_of_untracked

RANDOM = "random-{}.pt"  # the file of a rank, by its number


class EpochStop(StopPoint):
    """A `StopPoint` whose checkpoints also hold how many batches of which epoch are done, by how
    many ranks, and the states of the random generators, now and as the epoch began."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._own_names = frozenset(RANDOM.format(rank) for rank in range(self._info.world_size))
        self._own_facts = {"epoch": 0, "batches": 0}
        self._has_warned = self._is_within = False
        self._ended: int | None = None  # the epoch that this process has ended last
        self._begun: dict[str, Any] | None = None  # the generators as the epoch began
        self._random: dict[str, Any] | None = None  # those of the checkpoint, until restored

    @property
    def batches_done(self) -> int:
        """The number of batches that are done of the epoch with which `batches` goes on; within its
        loop the present batch counts as done. 0 where another number of ranks has begun the
        epoch."""
        ranks = self._info.world_size
        is_ours = self._own_facts.get("ranks", ranks) == ranks
        return int(self._own_facts["batches"]) if is_ours else 0

    @abstractmethod
    def _batches_left(self, loader: Any, epoch: int, done: int) -> Iterator[Any]:
        """Yield the batches of an epoch behind the first `done` ones, in the order that an
        undisturbed run has. The implementation calls `_restore_order` before the order is drawn."""

    @property
    @abstractmethod
    def _devices(self) -> list[torch.device]:
        """The devices whose generators a checkpoint holds."""

    def batches(self, loader: Any, epoch: int) -> Iterator[Any]:
        """Yield the batches of an epoch, from 0, that are left: none of an epoch that is done, the
        rest of an epoch that a checkpoint was saved in, all of a later one.

        `loader` is one that the library has prepared. Its persistent workers end as an epoch
        begins, and the random generators take the checkpoint's states. Rank 0 prints a warning for
        an epoch that is done, and for one that another number of ranks has begun, which begins
        anew. With the first batch UsageError is raised for a second loader of an epoch, within the
        loop over another one, and before `load`.
        """
        with self._loop_over_batches(epoch):
            done = self._begin_epoch(epoch)
            if done is None:
                return
            drop_iterator(loader)
            for batch in self._batches_left(loader, epoch, done):
                self._restore_random()
                self._own_facts["batches"] += 1
                yield batch
            self._restore_random()
            self._end_epoch()

    def _load_random(self, folder: Path) -> None:
        """Read the states of this rank's generators from a checkpoint's folder, for `batches` to
        restore; do nothing on a rank that the checkpoint's world did not have."""
        path = folder / RANDOM.format(self.rank)
        if path.exists():  # else: another number of ranks
            self._begun, self._random = torch.load(path, weights_only=True)

    def _save_random(self, folder: Path) -> None:
        """Write the states of this rank's generators, as the epoch began and as they are now, into
        a checkpoint's folder."""
        random = [self._begun, rng.snapshot(self._devices)]
        torch.save(random, folder / RANDOM.format(self.rank))

    def _restore_order(self, generators: Sequence[torch.Generator], done: int) -> None:
        """Put the global generators, those of the devices and the loader's own `generators` into
        the states with which the epoch began, if some of its batches are `done` and a checkpoint
        has the states. Note the states as those of the epoch's begin."""
        if done and self._begun is not None:
            put_states(self._begun, generators, self._devices)
        self._begun = states_of(generators, self._devices)

    def _check_within(self) -> None:
        """Raise UsageError outside of a loop over `batches`."""
        if not self._is_within:
            raise UsageError(
                "stop.save was called outside of a loop over stop.batches, and a checkpoint of"
                " there would not say which batches are done",
                hint="for batch in stop.batches(loader, epoch): …; stop.save() as its last line",
            )

    def _warn_of_others(self, objects: Iterable[Any], remedy: str) -> None:
        """Before the first step of a run is counted, have rank 0 warn, as `warn_of_untracked` does,
        of objects of the script that are not among the `objects` of a checkpoint. `remedy` is the
        end of the warning."""
        if self.rank == 0 and self.position.step == 0:
            warn_of_untracked(objects, self._say, remedy)

    def _restore_random(self) -> None:
        """Put the generators into the states that they had at the checkpoint, the first time after
        `_load_random`; later calls do nothing. Skipping batches has drawn numbers."""
        if self._random is not None:
            rng.restore(self._random, self._devices)
            self._random = None

    @contextmanager
    def _loop_over_batches(self, epoch: int) -> Iterator[None]:
        """Mark the block as the loop over the batches of `epoch`. Raise UsageError within another
        such block, for a second loader of `epoch`, and before `load`."""
        if not self._is_restored:
            raise UsageError(
                "stop.batches was called before stop.load, which loads the run's checkpoint",
                hint="stop.load(…), once all objects are prepared",
            )
        if self._is_within or epoch == self._ended:
            where = "within another stop.batches" if self._is_within else f"again for epoch {epoch}"
            raise UsageError(
                f"stop.batches was called {where}; accepted: one loader for each epoch, whose"
                " batches are counted",
                hint="iterate the other loader itself: its batches begin anew after a resume",
            )
        self._is_within = True
        try:
            yield
        finally:
            self._is_within = False

    def _begin_epoch(self, epoch: int) -> int | None:
        """Begin an epoch, or the rest of it; return the number of its batches that are done, None
        for an epoch that is over.

        Rank 0 prints a warning for the first epoch that is over, since the loop does again what
        comes behind the epoch's batches, such as a scheduler's step; and for an epoch that another
        number of ranks has begun, which begins anew.
        """
        ranks = self._info.world_size
        begun_by = self._own_facts.get("ranks", ranks)
        is_begun = epoch == self._own_facts["epoch"] and self._own_facts["batches"]
        if is_begun and begun_by != ranks:
            self._say(
                f"WARNING: {begun_by} ranks have begun epoch {epoch}, and there are {ranks}"
                " now: it begins anew, so that some samples count twice"
            )
            self._own_facts["batches"] = 0
        if epoch < self._own_facts["epoch"]:
            if not self._has_warned:
                self._has_warned = True
                self._say(
                    f"WARNING: epoch {epoch} is done, and what the loop does behind its batches is"
                    " done again; begin with: for epoch in range(stop.position.epoch, …)"
                )
            return None
        done: int = self._own_facts["batches"] if epoch == self._own_facts["epoch"] else 0
        self._own_facts = {"epoch": epoch, "batches": done, "ranks": ranks}
        return done

    def _end_epoch(self) -> None:
        """Note that all batches of the epoch are done: a checkpoint from now on begins the next."""
        self._ended = self._own_facts["epoch"]
        self._own_facts |= {"epoch": self._ended + 1, "batches": 0}


def drop_iterator(loader: Any) -> None:
    """End the persistent workers of a loader, or of the one that it wraps. So each epoch begins as
    in a new process, which draws the workers' seed from the same generator as the order."""
    # Attributes of Fabric's loader and of Accelerate's.
    for part in (loader, *(getattr(loader, n, None) for n in ("_dataloader", "base_dataloader"))):
        if isinstance(part, DataLoader):
            part._iterator = None


def states_of(
    generators: Sequence[torch.Generator], devices: Sequence[torch.device]
) -> dict[str, Any]:
    """Return the states of the global generators, of those of `devices`, and of `generators`, for
    `put_states`."""
    return {**rng.snapshot(devices), "loader": [entry.get_state() for entry in generators]}


def put_states(
    states: dict[str, Any], generators: Sequence[torch.Generator], devices: Sequence[torch.device]
) -> None:
    """Put the global generators, those of `devices`, and `generators` into the states that
    `states_of` has returned. The first generator gets the first state, and so on; surplus ones of
    either are left out."""
    rng.restore(states, devices)
    for generator, state in zip(generators, states["loader"], strict=False):
        generator.set_state(state)


def find_generators_of_loader(loader: Any) -> list[torch.Generator]:
    """Return the torch generators among the attributes of a loader, and of the samplers and batch
    samplers below it, also of those that Fabric has wrapped; each once, the loader's first."""
    parts, generators = [loader], list[torch.Generator]()
    for part in parts:  # the list grows in the loop, by the samplers of each part
        entries = [getattr(part, "generator", None), *getattr(part, "__dict__", {}).values()]
        for entry in entries:  # a sampler may keep its generator under any name
            if isinstance(entry, torch.Generator) and entry not in generators:
                generators.append(entry)
        inner = [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
        # On several ranks Fabric wraps the script's sampler: `dataset._sampler` of its own.
        inner.append(getattr(getattr(part, "dataset", None), "_sampler", None))
        for sampler in inner:  # by identity: == of an array of indices is an array
            if sampler is not None and all(sampler is not entry for entry in parts):
                parts.append(sampler)
    return generators
