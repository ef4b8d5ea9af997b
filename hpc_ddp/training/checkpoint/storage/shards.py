"""The part of each tensor that a rank writes, and the memory from which it writes.

A tensor is stored as boxes of its global shape, so that what W ranks wrote can be read by any
number of ranks, whole or sharded in another way (`resharding.Reader`). `rank_part.parts_of_rank`
chooses the boxes of each rank.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Container, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from hpc_ddp.core.console.terminal import say
from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint.storage.layout import (
    MeshCut,
    Shape,
    StoredShard,
    aligned,
    dtype_named,
    split_own,
)
from hpc_ddp.training.models.dtensor import cuts_of, local_box

LEAST_SHARE = 1 << 25  # bytes; a file costs a parallel file system more than those of a smaller one
BLOCK = 1 << 27  # bytes of the staging memory; a multiple of the alignment


class LocalShard(NamedTuple):
    """A rank's part of a tensor: the numbers, the shape of the whole tensor, start and size of the
    part's box in it, and the cuts that give the box, if any do."""

    numbers: torch.Tensor
    shape: Shape
    start: Shape
    size: Shape
    cuts: tuple[MeshCut, ...] = ()


def whole(tensor: torch.Tensor) -> LocalShard:
    """Return a tensor as a part that is all of it."""
    shape = tuple(tensor.shape)
    return LocalShard(tensor, shape, (0,) * len(shape), shape)


def shard(tensor: Any) -> LocalShard:
    """Return this rank's part of a DTensor, which may be empty."""
    start, size = local_box(tensor)
    return LocalShard(tensor.to_local(), tuple(tensor.shape), start, size, cuts_of(tensor))


def rows(tensor: torch.Tensor, low: int, high: int) -> LocalShard | None:
    """Return the rows of a tensor that begin at its byte `low` or later and before its byte `high`;
    None if there are none. A scalar is one row.

    The tensor has at least one byte; `low` may be below 0 and `high` beyond its end.
    """
    if low <= 0 and tensor.nbytes <= high:
        return whole(tensor)
    count = tensor.shape[0] if tensor.dim() else 1
    # The numbers of the first rows at each edge or behind it: rounded up, and from 0 to `count`.
    first, last = (min(max(-(-edge * count // tensor.nbytes), 0), count) for edge in (low, high))
    if first >= last:
        return None
    if not tensor.dim():
        return whole(tensor)
    _, shape, start, size, _ = whole(tensor)
    return LocalShard(tensor[first:last], shape, (first, *start[1:]), (last - first, *size[1:]))


def share_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return the share of `total` bytes that rank `rank` of `size` ranks writes, as first byte and
    end; (0, 0) for none. Where there are several shares, each has at least `LEAST_SHARE` bytes, and
    the ranks with a share are spread over the nodes."""
    count = max(1, min(size, total // LEAST_SHARE))  # shares
    # Share n is that of rank n * size // count. The first share of this rank or a later one:
    number = -(-rank * count // size)
    if number * size // count != rank:
        return 0, 0
    return total * number // count, total * (number + 1) // count


class StagingBuffer:
    """Memory for one rank's parts: the bytes of its data file, in blocks.

    It is allocated anew only when the parts change, in practice at the first save. Where the rank's
    `device` is an accelerator the blocks are pinned. That is done in the training's thread: in
    another one it would break a graph that is being captured. All blocks but the last have a power
    of two as their size: torch rounds pinned memory up to one, and never gives it back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pins = devices.is_accelerator(device)
        self._blocks: list[torch.Tensor] = []
        self._segments: list[list[torch.Tensor]] = []  # the memory of each piece, in order
        self._copies: list[tuple[torch.Event, torch.Event]] = []  # begin and end, by device
        self.pieces: list[StoredShard] = []  # the places of the parts in the bytes

    def fill(self, parts: Mapping[str, LocalShard]) -> None:
        """Begin to copy the parts into the buffer, over the former ones. A thread may read the
        buffer only after `wait`. If the parts lie in other places than before, allocate the memory
        anew; a message is printed if it can't be pinned.

        The copies are queued in the devices' current streams. So later work of the training there
        comes after them, and the host waits for nothing.
        """
        pieces, size = lay_out(parts)
        if pieces != self.pieces:
            self._allocate(pieces, size)
        sources = {part.numbers.device for part in parts.values()}
        accelerators = [device for device in sources if devices.is_accelerator(device)]
        begins = [devices.mark(device, timed=True) for device in accelerators]
        for segments, part in zip(self._segments, parts.values(), strict=True):
            _begin_copy(part.numbers.detach(), segments)
        ends = [devices.mark(device, timed=True) for device in accelerators]
        self._copies = list(zip(begins, ends, strict=True))

    def wait(self) -> float:
        """Wait until the copies are done; return the time that the slowest device took for its
        copies, in seconds: 0 on the CPU, and where a device does not tell. Any thread may call it;
        the rank's device is the thread's current one from then on, also if nothing was copied."""
        devices.use(self._device)  # a new thread has the node's first device, and would open it
        for _, end in self._copies:
            end.synchronize()
        times = [devices.elapsed_s(begin, end) for begin, end in self._copies]
        return max((seconds for seconds in times if not math.isnan(seconds)), default=0.0)

    def _allocate(self, pieces: list[StoredShard], size: int) -> None:
        """Replace the memory by blocks of `size` bytes in all, and set `pieces` and the memory of
        each piece in the blocks."""
        self._segments, self._blocks = [], []  # free the old ones first
        for first in range(0, size, BLOCK):
            self._blocks.append(self._allocate_block(min(BLOCK, size - first)))
        self._segments = [_segments(piece, self._blocks) for piece in pieces]
        self.pieces = pieces

    def _allocate_block(self, size: int) -> torch.Tensor:
        """Return `size` bytes of the host's memory, uint8 of shape (size,), pinned if they can be.
        The first time that they can't, print a message."""
        # The CPU is named, since torch's default device may be another one.
        allocate = partial(torch.empty, size, dtype=torch.uint8, device="cpu")
        if self._pins:
            try:
                return allocate(pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                reason = str(error).partition("\n")[0]
                say(
                    f"saves hold the training up for their copy: no memory can be locked ({reason})"
                )
        return allocate()

    def is_finite(self, names: Container[str]) -> bool:
        """Return whether this rank's numbers of the tensors in `names` are finite; True without
        any.

        Call it after `wait`. It takes about the time of reading the numbers.
        """
        for piece, segments in zip(self.pieces, self._segments, strict=True):
            if split_own(piece.name)[0] in names and not all(map(_is_finite, segments)):
                return False
        return True

    @property
    def bytes(self) -> list[memoryview]:
        """The blocks' memory itself, in order; no copy."""
        return [memory_of(block) for block in self._blocks]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU; the caller keeps the tensor alive.

    It works without numpy, which not every torch has.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor's memory as 64-bit integers of shape (n,), and its last bytes, fewer than 8,
    as uint8. Both are of a copy where the tensor is not contiguous, or does not begin at a multiple
    of 8 bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.storage_offset() * flat.itemsize % 8 or flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    memory = flat.view(torch.uint8)
    end = memory.numel() // 8 * 8
    return memory[:end].view(torch.int64), memory[end:]


def _segments(piece: StoredShard, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the memory of a piece: for each block that has some of it, a tensor of shape
    (numbers,)."""
    dtype = dtype_named(piece.dtype)
    begin, end = piece.offset, piece.offset + math.prod(piece.size) * dtype.itemsize
    segments, first = [], 0  # first: byte of the next block
    for block in blocks:
        low, high = (min(max(edge - first, 0), block.numel()) for edge in (begin, end))
        if low < high:
            segments.append(block[low:high].view(dtype))
        first += block.numel()
    return segments


def _begin_copy(numbers: torch.Tensor, segments: list[torch.Tensor]) -> None:
    """Begin to copy a tensor, in the current stream of its device, into `segments`, which together
    have as many numbers."""
    # torch takes an asynchronous copy's conjugate on the host, perhaps before the copy is there.
    numbers = numbers.resolve_conj().resolve_neg()
    if len(segments) == 1:
        segments[0].view(numbers.shape).copy_(numbers, non_blocking=True)
        return
    flat, first = numbers.reshape(-1), 0
    for segment in segments:
        segment.copy_(flat[first : first + segment.numel()], non_blocking=True)
        first += segment.numel()


def _is_finite(numbers: torch.Tensor) -> bool:
    """Return whether there is no NaN or infinity, by the sum, which is not finite if a number is
    not. False also if the sum overflows; True for integers."""
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    if not numbers.is_floating_point():
        return True
    if numbers.dtype.itemsize == 1:  # no sum takes 8-bit numbers
        numbers = numbers.float()
    kind = torch.promote_types(numbers.dtype, torch.float32)  # a sum of halves would overflow
    return bool(torch.isfinite(numbers.sum(dtype=kind)))


def lay_out(parts: Mapping[str, LocalShard]) -> tuple[list[StoredShard], int]:
    """Return the place of each part in the rank's data file, in the order of `parts`, and the size
    of all parts, with the gaps of the alignment, in bytes."""
    pieces, offset = [], 0
    for name, (numbers, shape, start, size, cuts) in parts.items():
        dtype = str(numbers.dtype).removeprefix("torch.")
        pieces.append(StoredShard(name, dtype, shape, start, size, offset, cuts))
        offset += aligned(numbers.nbytes)
    return pieces, offset
