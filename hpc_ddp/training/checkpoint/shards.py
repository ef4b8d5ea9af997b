"""Which part of each tensor a rank writes, and how any part of it is read again.

A tensor is stored as boxes of its global shape, so that what W ranks wrote can be read by any
number of ranks, whole or sharded in another way. `state.my_parts` chooses the boxes of each rank.
"""

from __future__ import annotations

import ctypes
import errno
import math
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpc_ddp.core.errors import DiskError, HpcDdpError
from hpc_ddp.core.file_io import patiently
from hpc_ddp.training import devices
from hpc_ddp.training.models.dtensor import from_local, is_sharded, local_box

OWN = "@rank-"  # between the name of a tensor that each rank has its own of, and the rank
ALIGNMENT = 64  # bytes, so that a mapped file can be viewed as numbers of any type
MOST_FILES = 256  # open at a time; processes may have 1,024
LEAST_SHARE = 1 << 25  # bytes; a file costs a parallel file system more than those of a smaller one
BLOCK = 1 << 27  # bytes of the staging memory; a multiple of the alignment

Shape = tuple[int, ...]


class StoredShard(NamedTuple):  # thousands are made at each save, in the training's time
    """A box of the tensor `name`: `size` from `start` on, at byte `offset` of a data file."""

    name: str
    dtype: str
    shape: Shape  # of the whole tensor
    start: Shape
    size: Shape
    offset: int


class LocalShard(NamedTuple):
    """A rank's part of a tensor: the numbers, the whole shape, start and size of the box."""

    numbers: torch.Tensor
    shape: Shape
    start: Shape
    size: Shape


def whole(tensor: torch.Tensor) -> LocalShard:
    """Return a tensor as its own and only part."""
    shape = tuple(tensor.shape)
    return LocalShard(tensor, shape, (0,) * len(shape), shape)


def shard(tensor: Any) -> LocalShard:
    """Return this rank's part of a DTensor, which may be empty."""
    return LocalShard(tensor.to_local(), tuple(tensor.shape), *local_box(tensor))


def rows(tensor: torch.Tensor, low: int, high: int) -> LocalShard | None:
    """Return the rows of a tensor that begin between byte `low` and byte `high` of it, None without
    any.

    The tensor has at least one byte; `low` may be below 0 and `high` beyond its end.
    """
    if low <= 0 and tensor.nbytes <= high:
        return whole(tensor)
    count = tensor.shape[0] if tensor.dim() else 1
    first, last = (min(max(-(-edge * count // tensor.nbytes), 0), count) for edge in (low, high))
    if first >= last:
        return None
    if not tensor.dim():
        return whole(tensor)
    _, shape, start, size = whole(tensor)
    return LocalShard(tensor[first:last], shape, (first, *start[1:]), (last - first, *size[1:]))


def share_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return which of `total` bytes rank `rank` of `size` writes, as first byte and end; (0, 0) for
    none: shares have at least `LEAST_SHARE`, and their ranks are spread over the nodes."""
    count = max(1, min(size, total // LEAST_SHARE))
    number = -(-rank * count // size)  # of the first share that begins at this rank or later
    if number * size // count != rank:
        return 0, 0
    return total * number // count, total * (number + 1) // count


class StagingBuffer:
    """Memory for one rank's parts: the bytes of its data file, in blocks.

    It is allocated anew only when the parts change, in practice at the first save. Where the rank's
    `device` is an accelerator the blocks are pinned. All but the last have a power of two as their
    size: torch rounds pinned memory up to one, and keeps for good what it has once had.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[torch.Tensor] = []
        self._segments: list[list[torch.Tensor]] = []  # of each piece, in the order of its numbers
        self._copies: list[tuple[torch.Event, torch.Event]] = []  # begin and end, by device
        self.pieces: list[StoredShard] = []

    def fill(self, parts: Mapping[str, LocalShard]) -> None:
        """Begin to copy the parts in, over those before; no thread may read the buffer until
        `wait`.

        The copies take their place in the devices' current streams. So what the training does
        there afterwards comes after them, and the host waits for nothing.
        """
        pieces, size = lay_out(parts)
        if pieces != self.pieces:
            self._allocate(pieces, size)
        accelerators = {part.numbers.device for part in parts.values()}
        accelerators = {device for device in accelerators if devices.is_accelerator(device)}
        begins = [devices.mark(device, timed=True) for device in accelerators]
        for segments, part in zip(self._segments, parts.values(), strict=True):
            _copy(part.numbers.detach(), segments)
        ends = [devices.mark(device, timed=True) for device in accelerators]
        self._copies = list(zip(begins, ends, strict=True))

    def wait(self) -> float:
        """Wait until the parts are here, in any thread, whose current device is then the rank's,
        also without parts; return how long the slowest device copied, in s, 0 on the CPU and where
        a device does not tell."""
        devices.use(self._device)  # a thread begins with the node's first one, and opens it
        for _, end in self._copies:
            end.synchronize()
        times = [devices.elapsed_s(begin, end) for begin, end in self._copies]
        return max((seconds for seconds in times if not math.isnan(seconds)), default=0.0)

    def _allocate(self, pieces: list[StoredShard], size: int) -> None:
        """Replace the memory by blocks for `size` bytes, in which the pieces have their places."""
        self._segments, self._blocks = [], []  # free the old ones first
        for first in range(0, size, BLOCK):
            self._blocks.append(_allocate(min(BLOCK, size - first), self._device))
        self._segments = [_segments(piece, self._blocks) for piece in pieces]
        self.pieces = pieces

    def is_finite(self, names: Container[str]) -> bool:
        """Return whether this rank's numbers of the tensors `names` are finite; True without any.

        Call it after `wait`. It takes about the time of reading them.
        """
        for piece, segments in zip(self.pieces, self._segments, strict=True):
            if piece.name.partition(OWN)[0] in names and not all(map(_is_finite, segments)):
                return False
        return True

    @property
    def bytes(self) -> list[memoryview]:
        """The memory itself, in order; no copy."""
        return [memory_of(block) for block in self._blocks]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, which the caller keeps alive.

    Without numpy, which not every torch has.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor's memory as 64-bit integers of shape (n,), and its last bytes, fewer than 8,
    as uint8; a copy where the tensor is not contiguous and aligned."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.storage_offset() * flat.itemsize % 8 or flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    memory = flat.view(torch.uint8)
    end = memory.numel() // 8 * 8
    return memory[:end].view(torch.int64), memory[end:]


def _allocate(size: int, device: torch.device) -> torch.Tensor:
    """Return `size` bytes of the host, uint8 of shape (size,), pinned if they can be."""
    # Named, since torch's default device may be another one.
    memory = partial(torch.empty, size, dtype=torch.uint8, device="cpu")
    if devices.is_accelerator(device):
        with suppress(RuntimeError):  # no more memory may be locked; the copies take longer then
            return memory(pin_memory=True)
    return memory()


def _segments(piece: StoredShard, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the memory of a piece: a tensor of shape (numbers,) for each block that has some of
    it."""
    dtype = dtype_named(piece.dtype)
    begin, end = piece.offset, piece.offset + math.prod(piece.size) * dtype.itemsize
    segments, first = [], 0
    for block in blocks:
        low, high = (min(max(edge - first, 0), block.numel()) for edge in (begin, end))
        if low < high:
            segments.append(block[low:high].view(dtype))
        first += block.numel()
    return segments


def _copy(numbers: torch.Tensor, segments: list[torch.Tensor]) -> None:
    """Begin to copy a tensor into its memory, which has as many numbers, in the current stream of
    its device."""
    if len(segments) == 1:
        segments[0].view(numbers.shape).copy_(numbers, non_blocking=True)
        return
    flat, first = numbers.reshape(-1), 0
    for segment in segments:
        segment.copy_(flat[first : first + segment.numel()], non_blocking=True)
        first += segment.numel()


def _is_finite(numbers: torch.Tensor) -> bool:
    """Return whether there is no NaN or infinity, by the sum, which these survive; True for
    integers."""
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    if not numbers.is_floating_point():
        return True
    if numbers.dtype.itemsize == 1:  # no sum takes 8-bit numbers
        numbers = numbers.float()
    kind = torch.promote_types(numbers.dtype, torch.float32)  # a sum of halves would overflow
    return bool(torch.isfinite(numbers.sum(dtype=kind)))


def lay_out(parts: Mapping[str, LocalShard]) -> tuple[list[StoredShard], int]:
    """Return where each part goes in the data file, and the file's size in bytes."""
    pieces, offset = [], 0
    for name, (numbers, shape, start, size) in parts.items():
        dtype = str(numbers.dtype).removeprefix("torch.")
        pieces.append(StoredShard(name, dtype, shape, start, size, offset))
        offset += -(-numbers.nbytes // ALIGNMENT) * ALIGNMENT
    return pieces, offset


def dtype_named(name: str) -> torch.dtype:
    """Return torch's type by a name as ``float32``; raise AttributeError for an unknown one."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class UnreadableError(DiskError):
    """A data file can't be read; its content may be good."""


class Reader:
    """Reads tensors, or boxes of them, from the data files of a checkpoint, onto the CPU.

    By plain reads: an I/O error below a memory map would be a SIGBUS, which ends the process
    without a word, and no rank could wait for the disk. The price is memory for what is read, of
    which an optimizer's state needed a copy anyway.

    Parameters
    ----------
    files
        data files, and the pieces in each, as tuples of `StoredShard`; opened at the first read
    rank
        this reader's: of a tensor that each rank has saved for itself (``NAME@rank-R``) its copy is
        read. None: of those tensors only buffers can be read, as the first rank of the stage had
        them

    Attributes
    ----------
    of_other_ranks
        names of the tensors that ranks have saved for themselves, and that this reader lacks
    """

    def __init__(
        self, files: Iterable[tuple[Path, Iterable[tuple[Any, ...]]]], rank: int | None = None
    ) -> None:
        self._pieces: dict[str, list[tuple[Path, StoredShard]]] = {}
        self._files: dict[Path, FileIO] = {}
        weakref.finalize(self, _close, self._files)
        of_this_rank: dict[str, list[tuple[Path, StoredShard]]] = {}
        other_ranks: set[str] = set()
        for path, pieces in files:
            for piece in pieces:
                name, _, owner = piece[0].partition(OWN)
                if owner and owner != str(rank):
                    other_ranks.add(name)
                    continue
                index = of_this_rank if owner else self._pieces
                index.setdefault(name, []).append((path, StoredShard(*piece)))
        self._pieces |= of_this_rank
        self.of_other_ranks = other_ranks - self._pieces.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def describe(self, name: str) -> torch.Tensor:
        """Return a tensor of the stored shape and type that holds nothing (on ``meta``).

        Raise KeyError for a name that is not stored for this rank.
        """
        _, piece = self._pieces[name][0]
        return torch.empty(piece.shape, dtype=dtype_named(piece.dtype), device="meta")

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
            return from_local(self._box(name, *local_box(template)), template)
        shape = tuple(self.describe(name).shape)
        return self._box(name, (0,) * len(shape), shape)

    def _box(self, name: str, start: Shape, size: Shape) -> torch.Tensor:
        """Return a box of a tensor, from all pieces that have some of it; raises as `read`."""
        dtype = dtype_named(self._pieces[name][0][1].dtype)
        box = torch.empty(size, dtype=dtype, device="cpu")
        count = 0
        for path, piece in self._pieces[name]:
            low, extent = _overlap(piece, start, size)
            if all(n > 0 for n in extent):
                part = box[_slices(low, extent, start)]
                self._fill(part, path, piece, low)
                count += part.numel()
        if count != box.numel():
            raise HpcDdpError(f"{name}: only {count} of {box.numel()} numbers are stored")
        return box

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


def _overlap(piece: StoredShard, start: Shape, size: Shape) -> tuple[Shape, Shape]:
    """Return where the common part of a piece and a box begins, and its size, not above 0 where
    there is none."""
    low = tuple(map(max, start, piece.start))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(start, size, piece.start, piece.size, strict=True)
    )
    return low, tuple(end - first for end, first in zip(ends, low, strict=True))


def _slices(low: Shape, extent: Shape, base: Shape) -> tuple[slice, ...]:
    """Return the box that begins at `low` as slices of a tensor that begins at `base`."""
    return tuple(slice(a - b, a - b + n) for a, n, b in zip(low, extent, base, strict=True))
