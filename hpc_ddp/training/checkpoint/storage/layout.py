"""The boxes of tensors in a rank's part of a checkpoint, described once for many ranks.

Ranks that shard a model alike write the same tensors in the same order, cut along the same
dimensions: they have one layout. They differ in their places on the mesh only, from which the boxes
follow, and their offsets. So the index of a checkpoint has an entry for each tensor, and not for
each tensor and rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

OWN = "@rank"  # at the end of the name of a tensor that each rank has its own of
ALIGNMENT = 64  # bytes, so that staging memory can be viewed as numbers of any type

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # start and size


class MeshCut(NamedTuple):
    """A cut of a tensor's dimension `dim` into `parts` parts, as by ``torch.chunk``. A rank has the
    part with the number `place`, which is its coordinate on the `axis` of a mesh."""

    dim: int
    parts: int
    place: int
    axis: Hashable


class StoredShard(NamedTuple):  # thousands are made at each save, in the training's time
    """A box of the tensor `name`: `size` from `start` on, in each dimension, at byte `offset` of a
    rank's part of a file.

    `cuts`, one after the other, give this box; () if none do, as for some rows of a tensor.
    """

    name: str
    dtype: str
    shape: Shape  # of the whole tensor
    start: Shape
    size: Shape
    offset: int
    cuts: tuple[MeshCut, ...] = ()


class Cut(NamedTuple):
    """A `MeshCut` as all ranks of a layout have it: `axis` is the index of a rank's coordinate."""

    dim: int
    parts: int
    axis: int


class LayoutEntry(NamedTuple):
    """A box of a tensor in a layout. Each rank has the box that `cuts` give at its coordinates;
    without cuts each has `box`, which is None otherwise."""

    name: str
    dtype: str
    shape: Shape
    box: Box | None
    cuts: tuple[Cut, ...]

    def box_at(self, coordinates: Shape) -> Box:
        """Return the box that the rank with these coordinates has."""
        if self.box is not None:
            return self.box
        places = ((cut.dim, cut.parts, coordinates[cut.axis]) for cut in self.cuts)
        return cut_box(self.shape, places)


Layout = list[LayoutEntry]


def split_own(name: str) -> tuple[str, bool]:
    """Return the name of a stored tensor without `OWN` at its end, and whether it had it there."""
    return name.removesuffix(OWN), name.endswith(OWN)


def layout_of(pieces: Iterable[StoredShard]) -> tuple[Layout, Shape]:
    """Return the layout of a rank's `pieces`, and the rank's coordinates: its place on each axis of
    a mesh by which a tensor is cut, in the order of the axes' first use."""
    numbers: dict[Hashable, int] = {}  # indices in `coordinates`, by axis
    coordinates: list[int] = []
    layout = Layout()
    for name, dtype, shape, start, size, _, mesh_cuts in pieces:
        cuts = []
        for dim, count, place, axis in mesh_cuts:
            if axis not in numbers:
                numbers[axis] = len(coordinates)
                coordinates.append(place)
            cuts.append(Cut(dim, count, numbers[axis]))
        box = None if cuts else (start, size)
        layout.append(LayoutEntry(name, dtype, shape, box, tuple(cuts)))
    return layout, tuple(coordinates)


def digest_of(layout: Layout) -> bytes:
    """Return a digest of a layout, 16 bytes, equal for equal layouts only."""
    return hashlib.blake2b(repr(layout).encode(), digest_size=16).digest()


def offsets_of(layout: Layout, coordinates: Shape) -> list[int]:
    """Return, for each entry of a layout, the byte at which its box begins in the part of the rank
    with these coordinates."""
    offsets, offset = [], 0
    for entry in layout:
        offsets.append(offset)
        _, size = entry.box_at(coordinates)
        offset += aligned(math.prod(size) * item_size(entry.dtype))
    return offsets


def aligned(size: int) -> int:
    """Return a number of bytes, rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT  # -(-a // b) rounds up


def cut_box(shape: Shape, places: Iterable[tuple[int, int, int]]) -> Box:
    """Return the box of a tensor that cuts give, one after the other. Each of `places` is a cut: a
    dimension, the number of parts, and the number of the part that is kept."""
    start, size = [0] * len(shape), list(shape)
    for dim, count, place in places:
        low, high = _part(size[dim], count, place)
        start[dim] += low
        size[dim] = high - low
    return tuple(start), tuple(size)


def _part(size: int, count: int, place: int) -> tuple[int, int]:
    """Return the begin and end of part number `place` of `size` elements that are cut into `count`
    parts, as by ``torch.chunk``; the last parts may be empty."""
    chunk = -(-size // count)  # rounded up
    return min(place * chunk, size), min((place + 1) * chunk, size)


def cells(entry: LayoutEntry, box: Box) -> Iterator[tuple[Shape, Box]]:
    """Yield the places and the box of each of the boxes of `entry` that may overlap `box`: those
    that do so in the dimensions that are cut. The places are the number of the box's part in each
    cut.

    An entry without cuts has one box, which is yielded in any case, with the places ().
    """
    full = (0,) * len(entry.shape), entry.shape
    return _cells(entry.cuts, entry.box or full, box)


def _cells(cuts: Sequence[Cut], outer: Box, box: Box) -> Iterator[tuple[Shape, Box]]:
    """Yield places and box of each part into which `cuts` divide the box `outer`, if it overlaps
    `box` in the dimensions of the cuts. Without cuts yield () and `outer`."""
    start, size = outer
    if not cuts:
        yield (), outer
        return
    dim, count, _ = cuts[0]
    chunk = -(-size[dim] // count)  # rounded up
    # The overlap in this dimension, from `first` to before `last`, counted from the begin of outer.
    low = box[0][dim] - start[dim]
    first, last = max(low, 0), min(low + box[1][dim], size[dim])
    if first >= last:
        return
    for place in range(first // chunk, -(-last // chunk)):
        begin, end = _part(size[dim], count, place)
        inner_start = (*start[:dim], start[dim] + begin, *start[dim + 1 :])
        inner_size = (*size[:dim], end - begin, *size[dim + 1 :])
        for places, cell in _cells(cuts[1:], (inner_start, inner_size), box):
            yield (place, *places), cell


@lru_cache(maxsize=64)
def item_size(dtype: str) -> int:
    """Return the bytes of a number of a type by its name, as ``float32``."""
    return dtype_named(dtype).itemsize


def dtype_named(name: str) -> torch.dtype:
    """Return torch's type by a name as ``float32``; raise AttributeError for an unknown one."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def overlap(box: Box, wanted: Box) -> Box:
    """Return the common part of two boxes. Where they have none, the size of the result is 0 or
    less in at least one dimension."""
    low = tuple(map(max, box[0], wanted[0]))
    edges = zip(*box, *wanted, strict=True)
    ends = (min(begin + size, first + extent) for begin, size, first, extent in edges)
    return low, tuple(end - first for end, first in zip(ends, low, strict=True))
