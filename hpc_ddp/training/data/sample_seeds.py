"""Seeds of the generators that a data set draws from, its own ones among them."""

from __future__ import annotations

import functools
import inspect
import math
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hpc_ddp.core.console.terminal import say
from hpc_ddp.training.data.batch_plan import derive_seed
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.generators import bytes_of

T = TypeVar("T")
MOST_OBJECTS = 2000  # the most objects that a search visits
MOST_ITEMS = 64  # the most items of a list or dict: a data set may hold all of its samples
# Types whose objects are not searched.
_SEALED = (str, bytes, int, float, type(None), torch.Tensor, type, ModuleType)


class SampleSeeds:
    """Seeds the global generators for each sample, and the generators of transforms that can be
    seeded, as MONAI's and albumentations' can, in the data set and in `collate`.

    Other generators there keep their states: the data set may have drawn a split from one of them,
    which has to be the same in all processes. A resume draws other numbers from them. If `warns` is
    set, the first `fetch` prints a warning of this, and clears `warns`.
    """

    def __init__(self, dataset: Any, collate: object = None) -> None:
        self._dataset, self._collate = dataset, collate
        self._epoch = -1  # the epoch of the last search
        # The functions that seed transforms, each with a number that makes its seeds differ.
        self._seeders: list[tuple[int, Callable[[int], Any]]] = []
        self._generators: dict[str, Any] = {}  # that are not seeded, by place
        # For each transform's place the first place of those that were equal to it.
        self._twins: dict[str, str] = {}
        self._copied: dict[str, Any] | None = None  # attributes that persistent workers have
        self._samples = 0  # samples that were seeded since the epoch's begin
        self.warns = False

    def seed(self, number: int) -> None:
        """Seed with `number` the global generators of the CPU, and the transforms of the last
        search; count a sample. Each transform gets a seed of its own, or transforms would change
        the same samples. Transforms that the script has made equal share a seed: an image and its
        mask are turned alike."""
        rng.seed_all(number)
        self._samples += 1
        for index, seeder in self._seeders:
            seeder(derive_seed(number, index) % 2**32)  # numpy takes 32 bits

    def fetch(
        self,
        epoch: int,
        fetch_batch: Callable[[], T],
        refetch_last: Callable[[], object] | None = None,
    ) -> T:
        """Return `fetch_batch()`, the samples of one batch. At the first call of an epoch the data
        set is searched for transforms that can be seeded, since the loop may have set new ones. If
        `fetch_batch` itself makes transforms, and `refetch_last` is set, `fetch_batch` is called a
        second time, now with their seeds.

        At the first call of all, if `warns`, and only in the rank or its first loader worker, print
        a warning of state that a resume would lose: a generator that `fetch_batch` has changed, or
        a stream's own count of its epochs. `refetch_last` fetches the batch's last sample again: a
        generator of the data set that is in the same state afterwards is seeded by the data set,
        and not lost. It is None for a stream, which can't fetch a sample again.
        """
        if epoch == self._epoch:
            return fetch_batch()
        self._epoch, self._samples = epoch, 0
        return self._fetch_first(fetch_batch, refetch_last)

    def _fetch_first(
        self, fetch_batch: Callable[[], T], refetch_last: Callable[[], object] | None
    ) -> T:
        """Do the work of an epoch's first `fetch`: search the data set, call `fetch_batch`, search
        again, repeat the call if the first one has made transforms, and return its samples. Print
        the warnings at the first call of all."""
        self._search()
        worker = get_worker_info()
        warns = self.warns and not (worker and worker.id)
        before, attributes = _states_of(self._generators), plain_attributes(self._dataset)
        content, count = fetch_batch(), len(self._seeders)
        self._search()
        if refetch_last and len(self._seeders) > count:
            content = fetch_batch()
        if warns:
            self.warns = False
            self._warn_of_generators(before, refetch_last)
            self._warn_of_count(attributes)
        return content

    def _search(self) -> None:
        """Search the data set and `collate` for transforms and generators. Give each transform a
        number for its seed, made of its place, so that it is the same in each process. Transforms
        whose generators had equal states when a search first met them share a number."""
        transforms, self._generators = find_transforms_and_generators(self._dataset)
        of_collate, collate_generators = find_transforms_and_generators(
            self._collate, "collate_fn", root_may_be_transform=True
        )
        transforms |= of_collate
        # In the rank itself the script may track a generator of `collate`: no warning of it there.
        if get_worker_info():
            ids = set(map(id, self._generators.values()))
            self._generators |= {n: g for n, g in collate_generators.items() if id(g) not in ids}
        firsts: dict[tuple[bytes, ...], str] = {}
        self._seeders = []
        for place, transform in transforms.items():
            if place not in self._twins:
                _, generators = find_transforms_and_generators(transform)
                states = tuple(_states_of(generators).values())
                self._twins[place] = firsts.setdefault(states, place) if states else place
            if seeder := _seeder_of(transform):
                self._seeders.append((zlib.crc32(self._twins[place].encode()), seeder))

    def _warn_of_generators(
        self, before: Mapping[str, bytes], refetch_last: Callable[[], object] | None
    ) -> None:
        """Print a warning of the first generator, by place, whose state is not as `before` (states
        by place), or that is new. Leave out a generator of the data set that a call of
        `refetch_last` leaves in the same state (see `fetch`). Print nothing for a stream with
        ``set_epoch``, which a resume calls as well."""
        if isinstance(self._dataset, IterableDataset) and hasattr(self._dataset, "set_epoch"):
            return
        states = _states_of(self._generators)
        changed = [place for place in states if states[place] != before.get(place)]
        if changed and refetch_last:
            refetch_last()
        after = _states_of(self._generators)
        for place in sorted(changed):
            # `refetch_last` does not call ``collate_fn``. A state that it leaves equal is set by
            # each sample.
            is_of_collate = place.startswith("collate_fn")
            if is_of_collate or not refetch_last or after.get(place) != states[place]:
                source = "collate_fn" if is_of_collate else "the data set"
                say(
                    f"WARNING: {source} draws from a generator of its own, {place}: after a resume"
                    " it draws other numbers; take torch's, numpy's or python's global one, which"
                    " is seeded for each sample"
                )
                return

    def _warn_of_count(self, attributes: Mapping[str, Any]) -> None:
        """Print a warning if a stream without ``set_epoch`` seems to count its epochs: a number
        among its attributes, no bool, has grown by 1 while three samples or more were drawn. A
        count of samples would have grown by more. The warning names the first such attribute, by
        name. `attributes` are those before the first sample."""
        stream: Any = self._dataset
        has_epochs = isinstance(stream, IterableDataset) and not hasattr(stream, "set_epoch")
        if not has_epochs or self._samples < 3:
            return
        for key in changes_of(stream, attributes):
            is_flag = isinstance(attributes[key], bool)
            if not is_flag and getattr(stream, key) == attributes[key] + 1:
                say(
                    f"WARNING: the stream counts its epochs in its attribute {key}: after a resume"
                    " it begins as made; give it set_epoch(epoch), which is called before each"
                    " epoch"
                )
                return

    def warn_of_copies(self, warn: Callable[[str], None]) -> None:
        """Called before each epoch whose loader workers persist. The first call notes the numbers
        among the data set's attributes, of which the workers get copies. A later call passes `warn`
        the text of a warning if a number has changed, once."""
        if self._copied is None:
            self._copied = plain_attributes(self._dataset)
        for key in changes_of(self._dataset, self._copied):
            warn(
                f"WARNING: the data set's attribute {key} has changed, and persistent workers keep"
                " the one of their first epoch, after a resume another one; run.loader(…,"
                " persistent_workers=False)"
            )
            self._copied = {}  # no further warning
            return


def plain_attributes(dataset: Any) -> dict[str, Any]:
    """Return the attributes of a data set's instance that are numbers or bools, by name."""
    entries = getattr(dataset, "__dict__", {}).items()
    return {key: entry for key, entry in entries if isinstance(entry, (int, float))}


def changes_of(dataset: Any, attributes: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of those `attributes` (numbers by name) that have other values in the
    data set now. An attribute that is NaN now, or that is no number any more, is left out."""
    current = plain_attributes(dataset)
    changed = {key for key in attributes.keys() & current if current[key] != attributes[key]}
    return sorted(key for key in changed if not math.isnan(current[key]))


def _states_of(generators: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the states of some generators, by place, as bytes to compare."""
    return {place: bytes_of(generator) for place, generator in generators.items()}


def find_transforms_and_generators(
    root: Any, name: str = "dataset", *, root_may_be_transform: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Search an object, and what it holds, breadth first, for transforms with a seeding method,
    which are not searched further, and for other random generators. Return both, by place: a text
    as ``dataset.transform``, that begins with `name`.

    A data set is searched, but never returned as a transform: it may draw its split by its seeding
    method, and a new seed would change the split. `root` is returned as a transform only if
    `root_may_be_transform`. At most `MOST_OBJECTS` objects are visited.
    """
    transforms: dict[str, Any] = {}
    generators: dict[str, Any] = {}
    visited: set[int] = set()
    queue = deque([(name, root)])
    while queue and len(visited) < MOST_OBJECTS:
        place, part = queue.popleft()
        if id(part) in visited or isinstance(part, _SEALED):
            continue
        visited.add(id(part))
        is_searched = isinstance(part, Dataset) or (part is root and not root_may_be_transform)
        if not is_searched and _seeder_of(part):
            transforms[place] = part
        elif rng.is_generator(part):
            generators[place] = part
        else:
            queue.extend(_parts_of(place, part))
    return transforms, generators


def _seeder_of(thing: Any) -> Callable[[int], Any] | None:
    """Return a function that seeds a transform: one of MONAI or albumentations, or of another
    library with a method ``set_random_state`` as theirs. Return None for other objects."""
    if not inspect.isfunction(getattr(type(thing), "set_random_state", None)):
        return None
    method = thing.set_random_state
    names = inspect.signature(method).parameters.keys()
    if "seed" in names:  # MONAI's, whose Compose draws a seed for each of its transforms
        return lambda seed: method(seed=seed)
    if {"random_generator", "py_random"} <= names:  # albumentations', shared by all transforms
        return lambda seed: method(
            random_generator=sys.modules["numpy"].random.default_rng(seed),
            py_random=random.Random(seed),
        )
    return None


def _parts_of(place: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object holds, each with its place, a text that begins with `place`:
    of a list or dict the first `MOST_ITEMS` items; of a ``partial``, a method or a closure the
    objects that it refers to; of any other object the instance's attributes."""
    if isinstance(thing, dict):
        yield from ((f"{place}[{k!r}]", entry) for k, entry in islice(thing.items(), MOST_ITEMS))
    elif isinstance(thing, (list, tuple)):
        yield from ((f"{place}[{n}]", entry) for n, entry in enumerate(thing[:MOST_ITEMS]))
    elif isinstance(thing, functools.partial):
        yield from ((f"{place}.{n}", getattr(thing, n)) for n in ("func", "args", "keywords"))
    elif isinstance(thing, MethodType):
        yield f"{place}.__self__", thing.__self__
    elif isinstance(thing, FunctionType):
        names = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False)
        cells = ((name, cell) for name, cell in names if cell != CellType())  # no empty ones
        yield from ((f"{place}.{name}", cell.cell_contents) for name, cell in cells)
    elif isinstance(attributes := getattr(thing, "__dict__", None), dict):
        yield from ((f"{place}.{name}", entry) for name, entry in list(attributes.items()))
