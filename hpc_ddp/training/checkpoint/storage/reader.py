"""Any part of a tensor, whole or sharded in another way, from the parts of W ranks."""

from __future__ import annotations

import errno
import math
import weakref
from collections.abc import Container, Iterator, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch

from hpc_ddp.core.errors import DiskError, HpcDdpError
from hpc_ddp.core.file_io import patiently
from hpc_ddp.training.checkpoint.storage.layout import (
    OWN,
    Box,
    Layout,
    Shape,
    StoredShard,
    cells,
    dtype_named,
    offsets_of,
    overlap,
)
from hpc_ddp.training.checkpoint.storage.shards import memory_of
from hpc_ddp.training.models.dtensor import from_local, is_sharded, local_box

MOST_FILES = 256  # open at a time; processes may have 1,024


class UnreadableError(DiskError):
    """A data file can't be read; its content may be good."""


class Part(NamedTuple):
    """The tensors that one rank has written into a file, from byte `offset` on: those of the layout
    with the number `layout`, cut for the rank with these `coordinates`."""

    path: Path
    offset: int
    layout: int
    coordinates: Shape = ()


class Reader:
    """Reads tensors, or boxes of them, from the data files of a checkpoint, onto the CPU.

    By plain reads: an I/O error below a memory map would be a SIGBUS, which ends the process
    without a word, and no rank could wait for the disk. The price is memory for what is read, of
    which an optimizer's state needed a copy anyway.

    Parameters
    ----------
    layouts
        of the parts
    parts
        of all ranks; a file is opened at the first read
    own
        numbers of the parts that this reader's rank has written: of a tensor that each rank has
        saved for itself (``NAME@rank``) it reads the copy in these. Without any, only buffers can
        be read of those tensors, as the first rank of the stage had them

    Attributes
    ----------
    of_other_ranks
        names of the tensors that ranks have saved for themselves, and that this reader lacks
    """

    def __init__(
        self, layouts: Sequence[Layout], parts: Sequence[Part], own: Container[int] = ()
    ) -> None:
        self._layouts, self._parts = layouts, parts
        self._files: dict[Path, FileIO] = {}
        weakref.finalize(self, _close, self._files)
        # Of each tensor: the number of a layout, the place in it, and the part if one is meant.
        self._places: dict[str, list[tuple[int, int, int | None]]] = {}
        self._offsets: dict[int, list[int]] = {}  # of a part's boxes
        self._writers: dict[tuple[int, Shape], dict[Shape, int]] = {}  # parts by layout and axes
        of_ranks: set[str] = set()
        for number, layout in enumerate(layouts):
            for place, entry in enumerate(layout):
                name, is_own, _ = entry.name.partition(OWN)
                if is_own:
                    of_ranks.add(name)
                else:
                    self._places.setdefault(name, []).append((number, place, None))
        for index, part in enumerate(parts):
            if index in own:
                for place, entry in enumerate(layouts[part.layout]):
                    name, is_own, _ = entry.name.partition(OWN)
                    if is_own:
                        self._places[name] = [(part.layout, place, index)]
        self.of_other_ranks = of_ranks - self._places.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def describe(self, name: str) -> torch.Tensor:
        """Return a tensor of the stored shape and type that holds nothing (on ``meta``).

        Raise KeyError for a name that is not stored for this rank.
        """
        layout, place, _ = self._places[name][0]
        entry = self._layouts[layout][place]
        return torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="meta")

    def read(self, name: str, template: torch.Tensor | None = None) -> torch.Tensor:
        """Return a new tensor, or, where `template` is a DTensor, this rank's part of it as one.

        Raises
        ------
        KeyError
            the name is not stored for this rank
        UnreadableError
            the disk does not answer, and was waited for
        HpcDdpError
            the files do not hold all of it
        """
        if template is not None and is_sharded(template):
            return from_local(self.read_box(name, local_box(template)), template)
        shape = tuple(self.describe(name).shape)
        return self.read_box(name, ((0,) * len(shape), shape))

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, from all parts that have some of it; raises as `read`."""
        start, size = box
        numbers = torch.empty(size, dtype=self.describe(name).dtype, device="cpu")
        count = 0
        for path, piece in self._pieces(name, box):
            low, extent = overlap((piece.start, piece.size), box)
            if all(n > 0 for n in extent):
                part = numbers[_slices(low, extent, start)]
                self._fill(part, path, piece, low)
                count += part.numel()
        if count != numbers.numel():
            raise HpcDdpError(f"{name}: only {count} of {numbers.numel()} numbers are stored")
        return numbers

    def _pieces(self, name: str, box: Box) -> Iterator[tuple[Path, StoredShard]]:
        """Yield the boxes of a tensor that may have some of `box`, each with its file."""
        for number, place, own in self._places[name]:
            entry = self._layouts[number][place]
            axes = tuple(cut.axis for cut in entry.cuts)
            for places, (start, size) in cells(entry, box):
                index = self._parts_by(number, axes).get(places) if own is None else own
                if index is not None:
                    part = self._parts[index]
                    offset = part.offset + self._offsets_in(index)[place]
                    shard = StoredShard(name, entry.dtype, entry.shape, start, size, offset)
                    yield part.path, shard

    def _parts_by(self, layout: int, axes: Shape) -> dict[Shape, int]:
        """Return the numbers of the parts of a layout by their places on some of its axes."""
        key = layout, axes
        if key not in self._writers:
            self._writers[key] = {
                tuple(part.coordinates[axis] for axis in axes): index
                for index, part in enumerate(self._parts)
                if part.layout == layout
            }
        return self._writers[key]

    def _offsets_in(self, index: int) -> list[int]:
        """Return where each box of a part begins in it."""
        if index not in self._offsets:
            part = self._parts[index]
            self._offsets[index] = offsets_of(self._layouts[part.layout], part.coordinates)
        return self._offsets[index]

    def _fill(self, part: torch.Tensor, path: Path, piece: StoredShard, low: Shape) -> None:
        """Read the part of a tensor that begins at `low` from a piece, whole rows at a time.

        Raise UnreadableError if the disk does not answer for a minute.
        """
        shape = (*part.shape[:1], *piece.size[1:])
        is_direct = part.is_contiguous() and part.shape == shape
        rows = part if is_direct else torch.empty(shape, dtype=part.dtype, device="cpu")
        row_size = math.prod(piece.size[1:]) * part.dtype.itemsize
        first = low[0] - piece.start[0] if low else 0
        try:
            patiently(partial(self._read, path, piece.offset + first * row_size, memory_of(rows)))
        except OSError as error:
            raise UnreadableError(
                f"{path} can't be read, and was waited for: {error.strerror or error}",
                hint="the checkpoint stays as it is: start the run again when the disk answers",
            ) from error
        if not is_direct:
            inner = _slices(low, tuple(part.shape), (low[0], *piece.start[1:]))
            part.copy_(rows[inner])

    def _read(self, path: Path, offset: int, memory: memoryview) -> None:
        """Fill memory from byte `offset` of a file on. Raise OSError if it can't be read, or ends
        too early; the next call opens it anew."""
        file = self._files.pop(path, None) or FileIO(path)
        try:
            file.seek(offset)
            while memory:
                count = file.readinto(memory)
                if not count:
                    raise OSError(errno.EIO, "it ends too early")
                memory = memory[count:]
        except OSError:
            file.close()
            raise
        if len(self._files) >= MOST_FILES:
            _close(self._files)
        self._files[path] = file


def _close(files: dict[Path, FileIO]) -> None:
    """Close all files, and empty the dict."""
    while files:
        files.popitem()[1].close()


def _slices(low: Shape, extent: Shape, base: Shape) -> tuple[slice, ...]:
    """Return the box that begins at `low` as slices of a tensor that begins at `base`."""
    return tuple(slice(a - b, a - b + n) for a, n, b in zip(low, extent, base, strict=True))
