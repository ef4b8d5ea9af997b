"""The tensors that each rank has to save and is about to write, compared before any is written.

First a few numbers of each rank go to rank 0. Only where they do not fit together, names and
numbers of all tensors follow, for a sentence that names one.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint.storage.layout import OWN, Shape
from hpc_ddp.training.checkpoint.storage.shards import LocalShard, words
from hpc_ddp.training.process.rank_messages import Control

_ROW = 1024  # words of a row in `digest`
_SHOWN = 4  # names in an error


class Digest(NamedTuple):
    """An inventory in a few numbers, equal on all ranks of a stage apart from `written`, `copies`
    and `rank_0_objects`."""

    objects: int  # CRC32 of their names, equal on all ranks
    stage: int
    tensors: int  # CRC32 of names, shapes and checksums
    expected: int  # the sum over all tensors of their sizes, each times a weight of its name
    written: int  # the same sum over the numbers that the rank writes
    copies: int  # adds up to 0 over all ranks where copies of the same part are equal
    rank_0_objects: int  # CRC32 of the checksums of objects that may differ


@dataclass(frozen=True)
class Inventory:
    """The tensors of one rank.

    Attributes
    ----------
    stage
        number of its pipeline stage, 0 where there is none
    shapes
        by name, in order, of the tensors that the ranks of a stage save together
    written
        how many numbers of each tensor this rank writes, by the tensor's name
    checksums
        of the tensors that must be the same on all ranks of a stage, by name; empty where they are
        not compared
    objects
        names of the tracked objects that the ranks share, in order
    copies
        weight and checksum of each part of a sharded tensor that other ranks have, too, by ``NAME
        at START`` (see `dtensor.local_copies`); empty where they are not compared
    rank_0_objects
        checksums of the other objects that the ranks share, of which rank 0's are saved, by name;
        empty where they are not compared
    """

    stage: int
    shapes: Mapping[str, Shape]
    written: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[str, int] = field(default_factory=dict)
    objects: Sequence[str] = ()
    copies: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rank_0_objects: Mapping[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> Digest:
        """The inventory in seven numbers, for a first comparison."""
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        return Digest(
            _crc(self.objects),
            self.stage,
            _crc([*self.shapes.items(), *self.checksums.items()]),
            _weighted(sizes),
            _weighted(self.written),
            _weighted({place: weight * total for place, (weight, total) in self.copies.items()}),
            _crc(self.rank_0_objects.items()),
        )


def inventory_of(
    stage: int,
    tensors: Mapping[str, torch.Tensor],
    parts: Mapping[str, LocalShard],
    objects: Iterable[str] = (),
) -> Inventory:
    """Return a rank's inventory, without checksums. `stage` is the number of its pipeline stage, 0
    without pipelines.

    `tensors` has, by name, those that the rank saves together with others; `parts` has the parts
    that it writes, of which private ones (``NAME@rank``) do not count; `objects` are the names of
    the tracked objects that the ranks share, in any order.
    """
    return Inventory(
        stage,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        {name: math.prod(part.size) for name, part in parts.items() if not name.endswith(OWN)},
        objects=sorted(objects),
    )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bytes as 64-bit integers: a scalar, on the tensor's device.

    The sum is exact, and so the same in any order: ranks may lay a tensor out differently. It takes
    about the time of reading the tensor.
    """
    memory, tail = words(tensor)
    return memory.sum() + tail.sum(dtype=torch.int64)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum of a tensor's bytes as `checksum` does, in which each word has a weight by its
    place: rows that have changed places give another sum."""
    memory, tail = words(tensor)
    rows = memory[: len(memory) // _ROW * _ROW].view(-1, _ROW)
    # Sums of the columns and of the rows, so that a word counts by both; and the words behind them.
    parts = rows.sum(0), rows.sum(1), memory[rows.numel() :], tail
    # An odd weight: a product with an even one would lose a change of the highest bit.
    weights = [2 * torch.arange(len(p), device=p.device, dtype=torch.int64) + 1 for p in parts]
    return torch.stack([(p * w).sum() for p, w in zip(parts, weights, strict=True)]).sum()


def start_checksums(
    tensors: Mapping[str, torch.Tensor],
    sum_up: Callable[[torch.Tensor], torch.Tensor] = checksum,
) -> Callable[[], dict[str, int]]:
    """Begin to sum up tensors, in the devices' current streams; return a function that waits for
    the sums and returns them by the tensors' names, {} without tensors.

    `sum_up` returns a scalar of 64 bits on the device of its tensor. The training may go on and
    change the tensors meanwhile, and another thread may wait.
    """
    sums: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        sums.setdefault(tensor.device, {})[name] = sum_up(tensor)
    # One tensor per device, which is read by one copy.
    stacks = [(list(sums_of), torch.stack(list(sums_of.values()))) for sums_of in sums.values()]
    marks = [devices.mark(device) for device in sums if devices.is_accelerator(device)]

    def wait() -> dict[str, int]:
        """Wait for the devices; return the sums by name, sorted."""
        for mark in marks:
            mark.synchronize()
        totals: dict[str, int] = {}
        for names, stack in stacks:
            totals |= zip(names, stack.tolist(), strict=True)
        return dict(sorted(totals.items()))

    return wait


def with_checksums(
    inventory: Inventory,
    sums: Mapping[str, int],
    weights: Mapping[str, int],
    contents: Mapping[str, object],
) -> Inventory:
    """Return a copy of `inventory` with the checksums in `sums`: of tensors by name, and of copies
    by ``NAME at START``. `weights` has the weights of the copies, by the same keys. `contents` has,
    by name, the objects of which rank 0's are saved, as plain values; their CRC32 is computed here.
    """
    return replace(
        inventory,
        checksums={name: total for name, total in sums.items() if name not in weights},
        copies={place: (weight, sums[place]) for place, weight in weights.items()},
        rank_0_objects={name: _crc([_sorted(content)]) for name, content in contents.items()},
    )


def check_facts(control: Control, facts: Mapping[str, Any]) -> None:
    """Raise UsageError, on all ranks, where a rank has another value than rank 0 among `facts`, the
    values by name that decide the order of the data: ranks would take samples of different
    permutations, or other numbers of steps. A name that one of both lacks does not count.

    It is a collective. Raise RuntimeError if a peer is gone.
    """
    faults = (  # on rank 0; none on the others, where `to_first` returns no facts
        f"{name} is {facts_of_rank[name]} on rank {rank}, and {fact} on rank 0"
        for rank, facts_of_rank in enumerate(control.to_first(facts))
        for name, fact in facts.items()
        if facts_of_rank.get(name, fact) != fact
    )
    if fault := control.from_first(next(faults, "")):
        raise UsageError(
            f"{fault}; accepted: one value on all ranks",
            hint="start(seed=1) on each: ranks have random numbers of their own behind run.track;"
            " and a training set with all samples: run.loader shares them out",
        )


def find_misfit(control: Control, inventory: Inventory) -> HpcDdpError | None:
    """Compare the inventories of all ranks. Return, on all ranks, an error if they share different
    objects, or if their tensors would not make a whole; else None. Rank 0 prints a warning, once
    for the same names, if other objects differ (`Inventory.rank_0_objects`).

    All ranks must call it: it is a collective. Raise RuntimeError if a peer is gone.
    """
    digests = control.to_first(inventory.digest)
    fits, are_equal = control.from_first((fit_together(digests), has_equal_objects(digests)))
    if fits and are_equal:
        return None
    inventories = control.to_first(inventory)  # by rank on rank 0; [] on the others
    if inventories and not are_equal:
        _warn_of_difference(tuple(different_objects(inventories)))
    misfit: HpcDdpError | None = None
    if not fits:
        misfit = control.from_first(find_fault(inventories) if inventories else None)
    return misfit


def fit_together(digests: Sequence[Digest]) -> bool:
    """Return whether the ranks' digests say that their tensors make a whole: all ranks share the
    same objects, all ranks of a stage have the same tensors, each number of a tensor is written
    once, and copies of the same part are equal."""
    written = Counter[Digest]()  # the sum of `written`, by the part that a stage has in common
    for digest in digests:
        written[digest._replace(written=0, copies=0, rank_0_objects=0)] += digest.written
    stages = {digest.stage for digest in digests}
    return (
        sum(digest.copies for digest in digests) == 0
        and len({digest.objects for digest in digests}) == 1
        and len(stages) == len(written)  # no stage has two different parts in common
        and all(common.expected == total for common, total in written.items())
    )


def has_equal_objects(digests: Sequence[Digest]) -> bool:
    """Return whether all ranks of each stage have the same `rank_0_objects`, by the ranks'
    digests."""
    pairs = {(digest.stage, digest.rank_0_objects) for digest in digests}
    return len(pairs) == len({digest.stage for digest in digests})  # one for each stage


def different_objects(inventories: Iterable[Inventory]) -> list[str]:
    """Return the names in `Inventory.rank_0_objects` whose checksums differ between ranks of a
    stage, sorted."""
    checksums: dict[tuple[str, int], set[int]] = {}
    for inventory in inventories:
        for name, total in inventory.rank_0_objects.items():
            checksums.setdefault((name, inventory.stage), set()).add(total)
    return sorted({name for (name, _), totals in checksums.items() if len(totals) > 1})


@cache  # so that a second call with the same names does nothing
def _warn_of_difference(names: tuple[str, ...]) -> None:
    """Print a warning of the objects `names`, which differ between ranks; once in a process for the
    same names."""
    say(
        f"WARNING: ranks differ in {_listed(names)}, and a resume gives all of them rank 0's; to"
        f" keep each rank's own: run.track(…, per_rank={names})"
    )


def find_fault(inventories: Sequence[Inventory]) -> HpcDdpError:
    """Return the error of inventories, by rank, that do not fit together: a UsageError that names
    objects which only some ranks share, else an HpcDdpError that names the first tensor that
    differs. If no cause is found, it names none."""
    objects = {rank: {*inventory.objects} for rank, inventory in enumerate(inventories)}
    fault = _different_names(objects, "shares other objects", UsageError)
    for stage in sorted({inventory.stage for inventory in inventories}):
        members = {
            rank: inventory
            for rank, inventory in enumerate(inventories)
            if inventory.stage == stage
        }
        shapes = {rank: {*inventory.shapes.items()} for rank, inventory in members.items()}
        fault = fault or _different_names(shapes, "has other tensors to save")
        fault = fault or _different_numbers(members) or _different_copies(members)
        fault = fault or _wrong_counts(members)
    return fault or HpcDdpError("the ranks' tensors do not fit together")


def _different_names(
    items: Mapping[int, Set[Any]], difference: str, kind: type[HpcDdpError] = HpcDdpError
) -> HpcDdpError | None:
    """Return an error that names, for the first rank that differs from the lowest rank, the items
    that only one of both has; None if all ranks have the same.

    `items` are names, or pairs of a name and a shape, by rank. `difference` is the verb of the
    message, with its object; `kind` is the error's class.
    """
    first = min(items)
    for rank, items_of_rank in items.items():
        differing = items[first] ^ items_of_rank
        if names := sorted({pair if isinstance(pair, str) else pair[0] for pair in differing}):
            return kind(
                f"rank {rank} {difference} than rank {first}: {_listed(names)}",
                hint="track the same objects on all ranks, or name those that differ in"
                " run.track(…, per_rank=(…))",
            )
    return None


def _different_numbers(members: Mapping[int, Inventory]) -> HpcDdpError | None:
    """Return an error that names the first tensor whose checksum on some rank is not that of the
    lowest rank, and such ranks; None if there is no such tensor. `members` are the inventories of
    one stage by rank."""
    first = min(members)
    for name in members[first].shapes:
        expected = members[first].checksums.get(name)
        ranks = [
            rank for rank, inventory in members.items() if inventory.checksums.get(name) != expected
        ]
        if ranks:
            word = "ranks" if ranks[1:] else "rank"
            return HpcDdpError(
                f"{name} differs between rank {first} and {word} {_listed(ranks)}: a checkpoint"
                " takes some rows from each rank, so this one would be a mixture",
                hint="let DDP keep the ranks equal (run.wrap), and with tp start(deterministic="
                "True): layers outside of the plan have no average. With averaging now and then"
                " (local SGD, DiLoCo): run.track(…, per_rank=('model', 'optimizer')) saves each"
                " rank's",
            )
    return None


def _different_copies(members: Mapping[int, Inventory]) -> HpcDdpError | None:
    """Return an error that names the first part of a sharded tensor that differs between two ranks
    with copies of it; None if all copies are equal. `members` are the inventories of one stage by
    rank."""
    first: dict[str, tuple[int, int]] = {}  # checksum and rank by place
    for rank, inventory in members.items():
        for place, (_, total) in inventory.copies.items():
            expected, holder = first.setdefault(place, (total, rank))
            if total != expected:
                return HpcDdpError(
                    f"{place} differs between rank {holder} and rank {rank}, which have copies of"
                    " it: a checkpoint takes one, and a resume would go on with other numbers",
                    hint="change weights after run.fully_shard on all ranks alike, or before it",
                )
    return None


def _wrong_counts(members: Mapping[int, Inventory]) -> HpcDdpError | None:
    """Return an error that names the first tensor of which the ranks together would write more or
    fewer numbers than it has; None if there is none. `members` are the inventories of one stage by
    rank."""
    counts = Counter[str]()
    for inventory in members.values():
        counts.update(inventory.written)
    for name, shape in members[min(members)].shapes.items():
        if counts[name] != math.prod(shape):
            return HpcDdpError(
                f"{name} has {math.prod(shape)} numbers, and the ranks would write"
                f" {counts[name]}: it is not sharded alike on all of them",
                hint="shard it over run.mesh, or over a mesh of all ranks: run.fully_shard,"
                " run.parallelize with start(tp=…)",
            )
    return None


def _listed(values: Sequence[object]) -> str:
    """Return the first `_SHOWN` values for people, with commas, and ``…`` for more."""
    more = ", …" if values[_SHOWN:] else ""
    return ", ".join(map(str, values[:_SHOWN])) + more


def _sorted(content: Any) -> Any:
    """Return plain values with sorted lists in place of dicts and sets, whose order differs between
    processes: pairs of a key's text and its entry, and texts of a set's entries. Tuples become
    lists."""
    if isinstance(content, dict):
        return sorted(((repr(key), _sorted(entry)) for key, entry in content.items()), key=repr)
    if isinstance(content, (set, frozenset)):
        return sorted(map(repr, content))
    return [*map(_sorted, content)] if isinstance(content, (list, tuple)) else content


def _crc(items: Iterable[object]) -> int:
    """Return the CRC32 of the texts of some objects, in their order."""
    return zlib.crc32(repr(list(items)).encode())


def _weighted(counts: Mapping[str, int]) -> int:
    """Return the sum of `counts`, each times a weight that its name gives: so too many numbers of
    one tensor do not make up for too few of another."""
    return sum((zlib.crc32(name.encode()) + 1) * count for name, count in counts.items())
