"""Weights that the training does not change, such as a model below its adapter, and large buffers:
written once per attempt.

At a save each rank sums up its part of them where they are. While none has changed, their data file
is a hard link to that of the checkpoint before. So every checkpoint is complete by itself, and can
be removed without a look at the others.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hpc_ddp.core.checkpoints import FileFacts, step_of
from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint.storage.layout import StoredShard
from hpc_ddp.training.checkpoint.storage.shards import LocalShard, StagingBuffer, lay_out, words

LEAST_BYTES = 1 << 20  # of frozen weights; a rank with fewer writes them with its other weights
# Words of 8 bytes that are hashed at a time: few enough for the caches of an accelerator, and of a
# CPU, so that the memory is read once.
_CHUNK, _CHUNK_OF_CPU = 1 << 20, 1 << 16
# Odd numbers with irregular bits, below 2^63: the golden ratio's, and the first of MurmurHash3's
# 64-bit finalizer (Austin Appleby).
_STRIDE, _FACTOR = 0x1E3779B97F4A7C15, 0x7F51AFD7ED558CCD


@dataclass(frozen=True)
class FrozenPart:
    """A rank's frozen weights in one save.

    Attributes
    ----------
    pieces
        their places in the data file
    hashes
        of each weight's numbers, by its name
    buffer
        their bytes, which a device may still be copying; None where `file` has them
    file
        the data file of a published checkpoint that has them
    facts
        size and CRC32 of `file`
    """

    pieces: list[StoredShard]
    hashes: dict[str, int]
    buffer: StagingBuffer | None = None
    file: Path = Path()
    facts: FileFacts | None = None


class FrozenWeights:
    """The frozen weights of a rank, over the saves of an attempt."""

    def __init__(self) -> None:
        self._saved: FrozenPart | None = None  # of the last save, with its file
        self._changing: set[str] = set()  # by the script itself, as an average of weights
        self._can_link = True  # until a try of a hard link shows that the file system can't

    def take_out(self, parts: dict[str, LocalShard], names: Container[str]) -> FrozenPart | None:
        """Remove the frozen weights, those in `names`, from a rank's `parts` of a save, and return
        them for a file of their own: the last save's `FrozenPart`, with its file, if they have not
        changed; else one with a buffer into which their copy has begun.

        Return None, with all weights left in `parts`, where the frozen ones have fewer than
        `LEAST_BYTES`, or the file system has no links. A weight that has changed since the previous
        save stays in `parts`, at this and all later saves. Waits for the devices that have the
        weights.
        """
        frozen = {n: part for n, part in parts.items() if n in names and n not in self._changing}
        if not self._can_link or _are_few(frozen):
            return None
        hashes = _hashes_of(frozen)
        if self._saved:
            saved = self._saved.hashes
            changed = {name for name in frozen if saved.get(name, hashes[name]) != hashes[name]}
            self._changing |= changed
            frozen = {name: part for name, part in frozen.items() if name not in changed}
            hashes = {name: hashes[name] for name in frozen}
            if _are_few(frozen):
                return None
        for name in frozen:
            del parts[name]
        pieces = lay_out(frozen)[0]
        if self._saved and (self._saved.pieces, self._saved.hashes) == (pieces, hashes):
            return self._saved
        buffer = StagingBuffer(torch.device("cpu"))  # not pinned: such memory is never given back
        buffer.fill(frozen)
        return FrozenPart(pieces, hashes, buffer)

    def add(self, part: FrozenPart, path: Path, facts: FileFacts | None) -> FileFacts:
        """Note that a draft has the data file of `part` at `path`, to which later saves may link,
        once the draft is published; return the file's facts. `facts` are those of a file that was
        written at `path`; then also find out whether the file system has links. If `facts` is None,
        make a hard link to the last save's file (`part.file`) at `path`.

        Raise OSError if the link can't be made, as where the disk refuses or the file is gone.
        """
        if facts is None:
            assert part.facts
            facts = part.facts
            os.link(part.file, path)
            os.utime(path)  # a site that deletes old files takes it for a new one
        else:
            self._can_link = _can_link(path)
        # Where the file is after the draft's folder has been published.
        file = path.parent.with_name(f"step-{step_of(path.parent)}") / path.name
        self._saved = replace(part, buffer=None, file=file, facts=facts)
        return facts

    def forget(self) -> None:
        """Have the next save write all frozen weights, and link to no file: a save has failed, of
        which a linked file may be the cause."""
        self._saved = None


def _are_few(parts: Mapping[str, LocalShard]) -> bool:
    """Return whether parts have fewer than `LEAST_BYTES`, for which a file is not worth it."""
    return sum(part.numbers.nbytes for part in parts.values()) < LEAST_BYTES


def _can_link(file: Path) -> bool:
    """Return whether a hard link to a file can be made in another folder: BeeGFS, for one, refuses
    it. A link is made in the folder above the file's own, and removed again."""
    link = file.parent.with_name(f".link-{os.urandom(8).hex()}")
    try:
        os.link(file, link)
    except OSError:
        return False
    with suppress(OSError):
        link.unlink()
    return True


def _hashes_of(parts: Mapping[str, LocalShard]) -> dict[str, int]:
    """Return the hash of each part's numbers, by name; waits for their devices."""
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, part in parts.items():
        by_device.setdefault(part.numbers.device, {})[name] = hash_of(part.numbers)
    hashes: dict[str, int] = {}
    for scalars in by_device.values():  # one copy to the host per device
        hashes |= zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True)
    return hashes


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of a tensor's bytes and their order: a scalar, int64, on its device.

    Each word of 8 bytes is mixed with its place, and the results are added up. A change of one word
    always shows; that several cancel each other has a chance of 1 in 2^64.
    """
    memory, tail = words(tensor)
    padding = torch.zeros(8, dtype=torch.uint8, device=tail.device)
    last = torch.cat([tail, padding])[:8].view(torch.int64)  # the last bytes as one word
    most = _CHUNK if devices.is_accelerator(memory.device) else _CHUNK_OF_CPU
    size = min(max(memory.numel(), 1), most)
    places = torch.arange(size, device=memory.device) * _STRIDE
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for number, chunk in enumerate((last, *torch.split(memory, size))):
        # A finalizer of 64-bit hashes: shifts are made unsigned by a mask.
        mixed = (places[: chunk.numel()] + chunk).add_(number).mul_(_FACTOR)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_((1 << 32) - 1)).mul_(_STRIDE)
        mixed.bitwise_xor_((mixed >> 29).bitwise_and_((1 << 35) - 1))
        total += mixed.sum()
    return total
