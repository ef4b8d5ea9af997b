"""Seeds of the generators that a data set draws from, its own ones among them."""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hpc_ddp.core.console.terminal import say
from hpc_ddp.training.data.order import derive
from hpc_ddp.training.models import rng

MOST_OBJECTS = 2000  # that are looked at
MOST_ITEMS = 64  # of a list or dict: a data set may hold all of its samples
_SEALED = (str, bytes, int, float, type(None), torch.Tensor, type, ModuleType)


class SampleSeeds:
    """Seeds the global generators for each sample, and those of transforms that can be seeded, as
    MONAI's and albumentations' can.

    A data set's other generators keep their states: it may have drawn a split from one that has to
    be the same in all processes. But a resume draws other numbers there; the process that fetches
    the first sample warns of it.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch = -1  # in which the data set was looked through
        self._seeders: list[Callable[[int], Any]] = []
        self._copied: dict[str, Any] | None = None  # attributes that persistent workers have
        self._samples = 0  # that were seeded since `watched` began
        self.warns = False

    def seed(self, number: int) -> None:
        """Seed all generators that can be seeded, but for the devices'. Each transform has a seed
        of its own: two of one seed would flip the same samples."""
        rng.seed_all(number)
        self._samples += 1
        for index, seeder in enumerate(self._seeders):
            seeder(derive(number, index) % 2**32)

    @contextmanager
    def watched(self, epoch: int, repeat: Callable[[], object] | None = None) -> Iterator[None]:
        """In an epoch's first block find the transforms that can be seeded: the loop may have set
        others. In the first one of all warn, if `warns`, of what has changed in it, and begins as
        made at a resume: a generator, unless `repeat`, which fetches the last sample again, leaves
        it in the same state, or a stream's count of its epochs."""
        if epoch == self._epoch:
            yield
            return
        self._epoch = epoch
        self._seeders, generators = find_generators(self._dataset)
        worker = get_worker_info()
        if not self.warns or (worker and worker.id):
            yield
            return
        before, attributes = _states_of(generators), plain_attributes(self._dataset)
        self._samples = 0
        yield
        self.warns = False
        if after := [pair for pair in _states_of(generators).items() if pair not in before.items()]:
            if repeat:
                repeat()
            states = _states_of(generators)
            for place, state in after:
                if not repeat or states[place] != state:  # else it is seeded for each sample
                    say(
                        f"WARNING: the data set draws from a generator of its own, {place}: after a"
                        " resume it draws other numbers; take torch's, numpy's or python's global"
                        " one, which is seeded for each sample"
                    )
                    return
        stream: Any = self._dataset
        if isinstance(stream, IterableDataset) and not hasattr(stream, "set_epoch"):
            for key in changes_of(stream, attributes):
                # By the number of the samples it would be their count.
                if self._samples > 2 and getattr(stream, key) == attributes[key] + 1:
                    say(
                        f"WARNING: the stream counts its epochs in its attribute {key}: after a"
                        " resume it begins as made; give it set_epoch(epoch), which is called"
                        " before each epoch"
                    )
                    return

    def warn_of_copies(self, warn: Callable[[str], None]) -> None:
        """Called before each epoch whose loader workers persist: warn, once, of an attribute of the
        data set that has changed since the first one, in which the workers got their copies."""
        if self._copied is None:
            self._copied = plain_attributes(self._dataset)
        for key in changes_of(self._dataset, self._copied):
            warn(
                f"WARNING: the data set's attribute {key} has changed, and persistent workers keep"
                " the one of their first epoch, after a resume another one; run.loader(…,"
                " persistent_workers=False)"
            )
            self._copied = {}
            return


def plain_attributes(dataset: Any) -> dict[str, Any]:
    """Return the attributes of a data set that are numbers by name."""
    entries = getattr(dataset, "__dict__", {}).items()
    return {key: entry for key, entry in entries if isinstance(entry, (int, float))}


def changes_of(dataset: Any, attributes: dict[str, Any]) -> list[str]:
    """Return the names of plain `attributes` that are other numbers of a data set by now."""
    current = plain_attributes(dataset)
    changed = {key for key in attributes.keys() & current if current[key] != attributes[key]}
    return sorted(key for key in changed if not math.isnan(current[key]))


def _states_of(generators: dict[str, Any]) -> dict[str, bytes]:
    """Return the states of some generators, as bytes to compare."""
    return {place: pickle.dumps(rng.raw_state(entry)) for place, entry in generators.items()}


def find_generators(dataset: Any) -> tuple[list[Callable[[int], Any]], dict[str, Any]]:
    """Return the functions by which parts of a data set can be seeded, and other generators in its
    attributes, and in theirs, by their places."""
    seeders: list[Callable[[int], Any]] = []
    generators: dict[str, Any] = {}
    visited: set[int] = set()
    queue = deque([("dataset", dataset)])
    while queue and len(visited) < MOST_OBJECTS:
        place, thing = queue.popleft()
        if id(thing) in visited or isinstance(thing, _SEALED):
            continue
        visited.add(id(thing))
        # A data set that can be seeded may draw its split so.
        if not isinstance(thing, Dataset) and (seeder := _seeder_of(thing)):
            seeders.append(seeder)
        elif rng.is_generator(thing):
            generators[place] = thing
        else:
            queue.extend(_parts_of(place, thing))
    return seeders, generators


def _seeder_of(thing: Any) -> Callable[[int], Any] | None:
    """Return the function that seeds a transform of MONAI or albumentations, or one of another
    library with their methods; None for other objects."""
    method = getattr(thing, "set_random_state", None)
    if not inspect.ismethod(method):
        return None
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
    """Yield the attributes of an object at some place, the items of a list or dict, as many as are
    looked at, and what a function holds, by their places."""
    if isinstance(thing, dict):
        yield from ((f"{place}[{k!r}]", entry) for k, entry in islice(thing.items(), MOST_ITEMS))
    elif isinstance(thing, (list, tuple)):
        yield from ((f"{place}[{n}]", entry) for n, entry in enumerate(thing[:MOST_ITEMS]))
    elif isinstance(thing, functools.partial):
        yield from ((place, part) for part in (thing.func, thing.args, thing.keywords))
    elif isinstance(thing, MethodType):
        yield place, thing.__self__
    elif isinstance(thing, FunctionType):
        cells = (cell for cell in thing.__closure__ or () if cell != CellType())
        yield from ((place, cell.cell_contents) for cell in cells)
    elif isinstance(attributes := getattr(thing, "__dict__", None), dict):
        yield from ((f"{place}.{name}", entry) for name, entry in list(attributes.items()))
