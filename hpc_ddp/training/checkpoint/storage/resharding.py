"""Any part of a tensor, whole or sharded in another way, from the parts of W ranks."""

from __future__ import annotations

import errno
import math
import weakref
from collections.abc import Container, Iterator, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpc_ddp.core.errors import DiskError, HpcDdpError
from hpc_ddp.core.file_io import check_links, patiently
from hpc_ddp.training.checkpoint.storage.layout import (
    Box,
    Layout,
    Shape,
    StoredShard,
    cells,
    dtype_named,
    offsets_of,
    overlap,
    split_own,
)
from hpc_ddp.training.checkpoint.storage.shards import memory_of
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.dtensor import copies_of, is_sharded, local_box, make_dtensor

MOST_FILES = 256  # open at a time; processes may have 1,024
CHUNK = 1 << 27  # bytes that the ranks send each other at a time


class UnreadableError(DiskError):
    """A data file can't be read; its content may be good."""


class _Place(NamedTuple):
    """The place of a tensor: entry `number` of the layout with the number `layout`. `part` is the
    index of the one part that has the tensor; None: all parts with this layout have some of it."""

    layout: int
    number: int
    part: int | None = None


class Part(NamedTuple):
    """The tensors that one rank has written into a file, from byte `offset` on: those of the layout
    with the number `layout`, cut for the rank with these `coordinates`. `rank` is the writer."""

    path: Path
    offset: int
    layout: int
    coordinates: Shape = ()
    rank: int = 0


class Sharing:
    """Sends tensors that one rank has read to the others that need the same, by the training's
    process groups, through the memory of their devices.

    The rank that reads a tensor for all is most likely the one that has verified the part where the
    tensor begins: its node still has that part in memory. So each byte is read from the disk once,
    and not by each node.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self._device = rank, world_size, device

    def send(self, numbers: torch.Tensor, root: int, group: Any = None) -> None:
        """Send `numbers`, a contiguous tensor on the CPU, from the rank `root` to the others, whose
        tensor, of the same shape and type, is overwritten. `root` is counted over all ranks. It is
        a collective of `group`, the default group if it is None. Raise RuntimeError if a peer is
        gone."""
        content = numbers.view(-1).view(torch.uint8)
        if not len(content):  # `split` would return one chunk, of no bytes
            return
        for chunk in torch.split(content, CHUNK):
            on_device = chunk.to(self._device) if self.rank == root else self._like(chunk)
            dist.broadcast(on_device, root, group)
            if on_device is not chunk and self.rank != root:
                chunk.copy_(on_device)

    def _like(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of the shape of `chunk` on this rank's device; on the CPU return
        `chunk` itself."""
        if self._device.type == "cpu":
            return chunk
        return torch.empty_like(chunk, device=self._device)


class Reader:
    """Reads tensors, or boxes of them, from the data files of a checkpoint, onto the CPU.

    The reads are plain ones: an I/O error below a memory map would be a SIGBUS, which ends the
    process without a word, and no rank could wait for the disk. The price is memory for all that is
    read; an optimizer's state needs a copy anyway.

    Parameters
    ----------
    layouts
        of the parts
    parts
        of all ranks; a file is opened at the first read
    parts_of_rank
        indices of the `parts` that this reader's rank has written: of a tensor that each rank has
        saved for itself (``NAME@rank``) it reads the copy in them. Without any, it can read only
        the buffers among those tensors, as the first rank of the stage had them

    Attributes
    ----------
    sharing
        by which the ranks share the reading of tensors that all of them read, all in the same
        order; None: each reads for itself
    devices
        of the worker: a tensor that was on an accelerator goes to one of them if nothing says more
    of_other_ranks
        names of the tensors that ranks have saved for themselves, and that this reader lacks
    """

    def __init__(
        self, layouts: Sequence[Layout], parts: Sequence[Part], parts_of_rank: Container[int] = ()
    ) -> None:
        """Note the place of each tensor that this reader's rank can read."""
        self._layouts, self._parts = layouts, parts
        self._files: dict[Path, FileIO] = {}
        weakref.finalize(self, _close, self._files)
        self._places: dict[str, list[_Place]] = {}  # by a tensor's name
        self._offsets: dict[int, list[int]] = {}  # results of `_offsets_in`
        self._indices: dict[tuple[int, Shape], dict[Shape, int]] = {}  # results of `_parts_by`
        self.sharing: Sharing | None = None
        self.devices: Sequence[torch.device] = (CPU,)
        self._of_ranks: set[str] = set()  # the tensors that ranks have saved for themselves
        for number, layout in enumerate(layouts):
            for place, entry in enumerate(layout):
                name, is_own = split_own(entry.name)
                if is_own:
                    self._of_ranks.add(name)
                else:
                    self._places.setdefault(name, []).append(_Place(number, place))
        for index, part in enumerate(parts):
            if index in parts_of_rank:
                for place, entry in enumerate(layouts[part.layout]):
                    name, is_own = split_own(entry.name)
                    if is_own:
                        self._places[name] = [_Place(part.layout, place, index)]
        self.of_other_ranks = self._of_ranks - self._places.keys()

    def close_files(self) -> None:
        """Close the files; the next read opens them anew. Else loader workers, which are forks,
        would hold them open, and the disk's space in use after the checkpoint has been removed."""
        _close(self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def device(self, number: int) -> torch.device:
        """Return the worker's device with the index `number`; the first one where it has fewer
        now."""
        return self.devices[number if number < len(self.devices) else 0]

    def describe(self, name: str) -> torch.Tensor:
        """Return a tensor of the stored shape and type that holds nothing (on ``meta``).

        Raise KeyError for a name that is not stored for this rank.
        """
        place = self._places[name][0]
        entry = self._layouts[place.layout][place.number]
        return torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="meta")

    def read(self, name: str, template: torch.Tensor | None = None) -> torch.Tensor:
        """Return a stored tensor, new, on the CPU. Where `template` is a DTensor, return a DTensor
        that is sharded like it, of which this rank's part is on the CPU. With `sharing` all ranks
        call it, in the same order.

        Raises
        ------
        KeyError
            the name is not stored for this rank
        UnreadableError
            the disk does not answer, and was waited for
        HpcDdpError
            the files do not hold all of the tensor
        RuntimeError
            a peer is gone
        """
        if template is not None and is_sharded(template):
            return make_dtensor(self._read_shard(name, template), template)
        stored = self.describe(name)
        shape = tuple(stored.shape)
        box = (0,) * len(shape), shape
        if self.sharing is None or name in self._of_ranks:
            return self.read_box(name, box)
        # The rank whose number is that of the writer of the tensor's begin: see `Sharing`.
        writer, _ = next(self._pieces(name, box), (0, None))
        root = self._parts[writer].rank % self.sharing.world_size if self._parts else 0
        is_root = self.sharing.rank == root
        numbers = self.read_box(name, box) if is_root else _blank(shape, stored.dtype)
        self.sharing.send(numbers, root)
        return numbers

    def _read_shard(self, name: str, template: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the stored tensor `name`, cut as the DTensor `template` is.
        With `sharing` only the first of the ranks with the same part reads it, and sends it to the
        others. Raises as `read`."""
        box = local_box(template)
        if self.sharing is None:
            return self.read_box(name, box)
        copies = copies_of(template)
        if all(is_first for _, _, is_first in copies):
            numbers = self.read_box(name, box)
        else:
            numbers = _blank(box[1], self.describe(name).dtype)
        for group, root, _ in copies:  # along each axis of the mesh on which the part is the same
            self.sharing.send(numbers, root, group)
        return numbers

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, new, on the CPU, which this rank reads from all parts that have
        some of it. Raise KeyError, UnreadableError and HpcDdpError as `read`."""
        start, size = box
        numbers = _blank(size, self.describe(name).dtype)
        count = 0
        for writer, piece in self._pieces(name, box):
            low, extent = overlap((piece.start, piece.size), box)
            if all(length > 0 for length in extent):
                part = numbers[_slices(low, extent, start)]
                self._fill(part, writer, piece, low)
                count += part.numel()
        if count != numbers.numel():
            raise HpcDdpError(f"{name}: only {count} of {numbers.numel()} numbers are stored")
        return numbers

    def _pieces(self, name: str, box: Box) -> Iterator[tuple[int, StoredShard]]:
        """Yield, for each stored box of the tensor `name` that may overlap `box`, the index of the
        rank's part that has the stored box, and the stored box, with its offset in the file."""
        for place in self._places[name]:
            entry = self._layouts[place.layout][place.number]
            axes = tuple(cut.axis for cut in entry.cuts)
            for coordinates, (start, size) in cells(entry, box):
                index = place.part
                if index is None:
                    index = self._parts_by(place.layout, axes).get(coordinates)
                if index is not None:  # else the parts of another layout have the box
                    part = self._parts[index]
                    offset = part.offset + self._offsets_in(index)[place.number]
                    yield index, StoredShard(name, entry.dtype, entry.shape, start, size, offset)

    def _parts_by(self, layout: int, axes: Shape) -> dict[Shape, int]:
        """Return the indices of the parts whose layout has the number `layout`, by the parts'
        coordinates with the indices `axes`; of parts with the same ones the last. The result is
        kept for the next call."""
        key = layout, axes
        if key not in self._indices:
            self._indices[key] = {
                tuple(part.coordinates[axis] for axis in axes): index
                for index, part in enumerate(self._parts)
                if part.layout == layout
            }
        return self._indices[key]

    def _offsets_in(self, index: int) -> list[int]:
        """Return the byte at which each box of the part with the number `index` begins in the part.
        The result is kept for the next call."""
        if index not in self._offsets:
            part = self._parts[index]
            self._offsets[index] = offsets_of(self._layouts[part.layout], part.coordinates)
        return self._offsets[index]

    def _fill(self, part: torch.Tensor, writer: int, piece: StoredShard, low: Shape) -> None:
        """Fill the tensor `part`, a box that begins at `low`, from the stored box `piece`, which is
        in the file of the rank part with the index `writer`. Whole rows of the stored box are read,
        into `part` itself where it has whole rows. Raise UnreadableError if the disk does not
        answer for a minute."""
        path = self._parts[writer].path
        shape = (*part.shape[:1], *piece.size[1:])  # () for a scalar
        is_direct = part.is_contiguous() and part.shape == shape
        rows = part if is_direct else _blank(shape, part.dtype)
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
        """Fill `memory` from byte `offset` of a file on; the file stays open for the next call.
        Raise OSError if it can't be read, ends too early, or lies behind a link of another user's:
        the next call then opens it anew."""
        if (file := self._files.pop(path, None)) is None:  # taken out, so that an error closes it
            check_links(path)
            file = FileIO(path)
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


def _blank(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor on the CPU, whatever torch's default device is."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _close(files: dict[Path, FileIO]) -> None:
    """Close all files, and empty the dict."""
    while files:
        files.popitem()[1].close()


def _slices(low: Shape, extent: Shape, base: Shape) -> tuple[slice, ...]:
    """Return slices that give the box of the size `extent` that begins at `low`, in a tensor that
    begins at `base`."""
    edges = zip(low, extent, base, strict=True)
    return tuple(slice(first - zero, first - zero + size) for first, size, zero in edges)
