"""Which boxes of which tensors lie in a rank's part of a checkpoint, said once for many ranks.

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

OWN = "@rank"  # after the name of a tensor that each rank has its own of
ALIGNMENT = 64  # bytes, so that staging memory can be viewed as numbers of any type

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # start and size


class MeshCut(NamedTuple):
    """One dimension of a tensor cut into so many `parts`, as by ``torch.chunk``; a rank has the one
    with the number `place`: its coordinate on the `axis` of a mesh."""

    dim: int
    parts: int
    place: int
    axis: Hashable


class StoredShard(NamedTuple):  # thousands are made at each save, in the training's time
    """A box of the tensor `name`: `size` from `start` on, at byte `offset` of a rank's part.

    `cuts` lead to it, one after the other; () if none do, as for some rows of a tensor.
    """

    name: str
    dtype: str
    shape: Shape  # of the whole tensor
    start: Shape
    size: Shape
    offset: int
    cuts: tuple[MeshCut, ...] = ()


class Cut(NamedTuple):
    """A `MeshCut` as all ranks of a layout have it: `axis` is the number of a coordinate."""

    dim: int
    parts: int
    axis: int


class LayoutEntry(NamedTuple):
    """A box that each rank of a layout has: that of `cuts`; else `box`, which is one rank's."""

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


def layout_of(pieces: Iterable[StoredShard]) -> tuple[Layout, Shape]:
    """Return the layout of a rank's part, and the rank's coordinates: its place on each axis by
    which something is cut, in the order of their first use."""
    numbers: dict[Hashable, int] = {}
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
    """Return 16 bytes that no other layout has."""
    return hashlib.blake2b(repr(layout).encode(), digest_size=16).digest()


def offsets_of(layout: Layout, coordinates: Shape) -> list[int]:
    """Return at which byte of its part each box of the rank with these coordinates begins."""
    offsets, offset = [], 0
    for entry in layout:
        offsets.append(offset)
        _, size = entry.box_at(coordinates)
        offset += aligned(math.prod(size) * item_size(entry.dtype))
    return offsets


def aligned(size: int) -> int:
    """Return a number of bytes, rounded up to the alignment of what comes next."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def cut_box(shape: Shape, places: Iterable[tuple[int, int, int]]) -> Box:
    """Return the box of a tensor to which cuts lead, each a dimension, a number of parts, and the
    place of one of them."""
    start, size = [0] * len(shape), list(shape)
    for dim, count, place in places:
        low, high = _part(size[dim], count, place)
        start[dim] += low
        size[dim] = high - low
    return tuple(start), tuple(size)


def _part(size: int, count: int, place: int) -> tuple[int, int]:
    """Return begin and end of a part, as ``torch.chunk`` cuts; the last ones may be empty."""
    chunk = -(-size // count)
    return min(place * chunk, size), min((place + 1) * chunk, size)


def cells(entry: LayoutEntry, box: Box) -> Iterator[tuple[Shape, Box]]:
    """Yield the places on the axes of `entry` whose boxes, along the dimensions that are cut, have
    some of `box`, and their boxes.

    An entry without cuts has one box, which comes in any case, with the places ().
    """
    full = (0,) * len(entry.shape), entry.shape
    return _cells(entry.cuts, entry.box or full, box)


def _cells(cuts: Sequence[Cut], outer: Box, box: Box) -> Iterator[tuple[Shape, Box]]:
    """Yield the places of all parts of the box `outer`, as cut, that have some of `box` along the
    dimensions of the cuts, and the parts; without cuts `outer` itself."""
    start, size = outer
    if not cuts:
        yield (), outer
        return
    dim, count, _ = cuts[0]
    chunk = -(-size[dim] // count)
    low = box[0][dim] - start[dim]
    first, last = max(low, 0), min(low + box[1][dim], size[dim])
    for place in range(first // chunk, -(-last // chunk)) if first < last else ():
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
    """Return the common part of two boxes; its size is not above 0 where there is none."""
    low = tuple(map(max, box[0], wanted[0]))
    edges = zip(*box, *wanted, strict=True)
    ends = (min(begin + size, first + extent) for begin, size, first, extent in edges)
    return low, tuple(end - first for end, first in zip(ends, low, strict=True))
