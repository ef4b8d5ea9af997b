"""Data that a script loads by itself, without a loader of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from sys import getrefcount
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hpc_ddp.core.console.terminal import say
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.data.dataloader import SeededBatches
from hpc_ddp.training.data.iterable import IterableBatches
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.tracked_objects import find_living
from hpc_ddp.training.process.rank_messages import Control

HINT = "write run.loader(dataset, batch_size) in place of DataLoader(dataset, …)"


class OwnData:
    """Warns of samples that are seen twice after a resume, by a call of `warn` with the text.

    `is_likely`: the run was resumed, and the script has neither a loader of the run nor objects
    that each rank has its own of, such as a StatefulDataLoader. If it is False, no method does
    anything.
    """

    def __init__(self, is_likely: bool, warn: Callable[[str], None]) -> None:
        self._is_likely, self._warn = is_likely, warn

    def warn_of_epoch(self, position: Position) -> None:
        """Called before the loop's first epoch. If the epoch at `position` is partly done, warn,
        once: its first samples are seen again. Else samples can be seen twice only if the iteration
        of a DataLoader is under way by now; if so, leave the warning to `warn_of_step`."""
        if self._is_likely and not position.epoch_steps:
            self._is_likely = is_own_loader_open()
        elif self._is_likely:
            self._is_likely = False
            self._warn(
                f"WARNING: the checkpoint is from epoch {position.epoch}, after"
                f" {position.epoch_steps} of its steps, and the script has no run.loader: a"
                f" DataLoader begins the epoch again, and its first samples are seen twice; {HINT}"
            )

    def warn_of_step(self) -> None:
        """Called at each step. At the first one after a resume, warn if a DataLoader of the script
        is being iterated."""
        if self._is_likely and is_own_loader_open():
            self._warn(
                "WARNING: the run goes on in the midst of a training, and a DataLoader of the"
                f" script has begun again: its first samples are seen twice; {HINT}"
            )
        self._is_likely = False


class StatefulLoaders:
    """The loaders and samplers among the tracked `objects`, as torchdata's StatefulDataLoader: they
    go on where a checkpoint in the midst of an epoch has left them.

    If the run `is_resumed`, `on_first_batch` is called, if it is set, as by a `Loader` once before
    the first batch of an epoch: behind the next ``iter`` of one of them. With `control` the ranks
    agree on the length of an epoch: making a StatefulLoaders is a collective then. `position` is
    the run's. Without arguments there are no loaders, and no method does anything.
    """

    def __init__(
        self,
        objects: Mapping[str, Any] | None = None,
        position: Position | None = None,
        control: Control | None = None,
        is_resumed: bool = False,
    ) -> None:
        """With `is_resumed` the class of each loader and sampler is replaced until its next
        ``iter``. Raise RuntimeError if a peer is gone."""
        kinds = (DataLoader, Sampler)
        sources = [source for source in (objects or {}).values() if isinstance(source, kinds)]
        self._position = position or Position()
        is_first = control is not None and control.rank == 0
        # Those of which `clear` has not warned. Rank 0 warns, so the other ranks have none.
        self._unwarned = {n: o for n, o in (objects or {}).items() if is_first and o in sources}
        self._length: int | None = None  # of an epoch, in batches, where all ranks have one loader
        if control is not None:
            lengths = [_length_of(source) for source in sources if isinstance(source, DataLoader)]
            of_ranks = control.to_first(lengths[0] if len(lengths) == 1 else None)
            self._length = control.from_first(of_ranks[0] if len({*of_ranks}) == 1 else None)
        self.on_first_batch: Callable[[], object] | None = None
        # Whether `on_first_batch` can still be called. If the script has asked for batches before
        # its loop, it can't.
        self.is_watched = is_resumed and bool(sources)
        if is_resumed:
            for source in sources:
                _call_at_iter(source, self._begin)

    def has_left(self, batches: int) -> bool:
        """Return whether exactly this many batches are left of the epoch, in which each batch is a
        step; False if its length is not known. The answer is the same on all ranks, which save and
        stop by it."""
        return self._length == self._position.epoch_steps + batches

    def clear(self) -> bool:
        """Called at each epoch's end. Drop `on_first_batch`, and return whether one was set that
        was not called. On rank 0 print a warning, once for each loader, if the script has left the
        loader's pass over the data by then."""
        for name in [name for name, source in self._unwarned.items() if is_left_amid_pass(source)]:
            del self._unwarned[name]
            say(
                f"WARNING: an epoch has ended amid a pass of {name}, which the script has left: a"
                " resume between two epochs yields the rest of the pass, and the undisturbed run"
                " begins a new one; a run.loader may be left by break"
            )
        is_unused, self.on_first_batch = self.on_first_batch is not None, None
        return is_unused

    def _begin(self) -> None:
        """Call `on_first_batch` if it is set, once."""
        call, self.on_first_batch, self.is_watched = self.on_first_batch, None, False
        if call is not None:
            call()


def _call_at_iter(source: Any, call: Callable[[], None]) -> None:
    """Have `call` called once, behind the next ``iter(source)``, which may draw random numbers, and
    before its first batch. Changes the class of `source` until then: Python looks up ``__iter__``
    in the class. A loaded pass of a StatefulDataLoader is opened (`_open_loaded_pass`)."""
    kind = type(source)

    def __iter__(self: Any) -> Any:
        """Put the class back, return an iterator of the source, and run `call`."""
        self.__class__ = kind
        # A StatefulDataLoader with a loaded state, and no iteration yet; others lack the names.
        if getattr(self, "next_iter_state", None) and getattr(self, "_iterator", "") is None:
            _open_loaded_pass(self)
        batches = iter(self)
        call()
        return batches

    source.__class__ = type(kind.__name__, (kind,), {"__iter__": __iter__})


def _open_loaded_pass(source: Any) -> None:
    """Have the next ``iter`` of a StatefulDataLoader, whose state was loaded, go on with the pass
    in that state, and draw no random number for it: the pass had drawn its own before the
    checkpoint. If the pass is at its end, ``iter`` still draws for the next pass."""
    with rng.preserve_generators():
        source._iterator = source._get_iterator()
    source._initial_iter_for_state_dict = True  # its ``iter`` then takes `_iterator` as it is


class _Holder:
    """An object whose attribute is the only reference to a second object."""

    def __init__(self) -> None:
        self._iterator = object()


def is_left_amid_pass(source: Any) -> bool:
    """Return whether a StatefulDataLoader was asked for some batches and not for all, and nothing
    but the loader refers to the iteration any more. A script that goes on with the iteration in its
    next epoch, as by ``cycle(loader)``, has a reference. False for any other object."""
    if not getattr(getattr(source, "_iterator", None), "_num_yielded", 0):
        return False
    # A plain DataLoader's iteration has no `_finished`, and no state to go on with.
    is_finished = getattr(source._iterator, "_finished", True)
    holder = _Holder()  # its count is that of one reference, whatever this Python adds for a call
    return not is_finished and getrefcount(source._iterator) <= getrefcount(holder._iterator)


def _length_of(loader: DataLoader[Any]) -> int | None:
    """Return a loader's number of batches per epoch; None for a stream, and where ``len`` fails. A
    stream isn't asked: torch would warn from then on if it has more."""
    with suppress(Exception):  # the script's own sampler may raise any
        return None if isinstance(loader.dataset, IterableDataset) else len(loader)
    return None


def is_own_loader_open() -> bool:
    """Return whether an iteration of a DataLoader is under way in this process, except for those of
    a run's loaders. The search through all objects of the process takes some 0.1 s."""
    kinds = SeededBatches, IterableBatches  # the data sets of a run's loaders
    iterations = find_living(_BaseDataLoaderIter)
    return any(not isinstance(iteration._dataset, kinds) for iteration in iterations)
