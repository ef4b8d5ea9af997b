"""One rank's part of a save: its content, and its writing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpc_ddp.core.checkpoints import FileFacts
from hpc_ddp.training.checkpoint.rank_comparison import Inventory
from hpc_ddp.training.checkpoint.storage import disk
from hpc_ddp.training.checkpoint.storage.frozen import FrozenPart, FrozenWeights
from hpc_ddp.training.checkpoint.storage.index import FROZEN, Claim, Plan, dump
from hpc_ddp.training.checkpoint.storage.layout import Layout, digest_of, layout_of
from hpc_ddp.training.checkpoint.storage.shards import StagingBuffer

Bytes = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class Content:
    """Everything that one rank has to save: nothing in it changes until it is saved.

    Attributes
    ----------
    step
        of the run
    facts
        for the manifest, in plain values; ``best`` (a dict with ``step``, or None) among them
    shared
        plain values that are the same on all ranks; rank 0's are written
    rank_values
        this rank's own plain values
    buffer
        this rank's part of the tensors; a device may still be copying them
    trained
        names of the tensors that have to be finite
    inventory
        returns the names, shapes and parts of all tensors, for the ranks to compare; called in the
        thread that saves
    stream
        number of this rank's random generators
    frozen
        the weights that have a data file of their own, None without any
    stall_s
        for how long the host has been held up so far, in seconds
    """

    step: int
    facts: dict[str, Any]
    shared: dict[str, Any]
    rank_values: dict[str, Any]
    buffer: StagingBuffer
    trained: set[str]
    inventory: Callable[[], Inventory]
    stream: int = 0
    frozen: FrozenPart | None = None
    stall_s: float = 0.0


class Payload(NamedTuple):
    """The bytes that a rank writes into a checkpoint, and the layouts of `tensors` and, if there
    are any, of `frozen`."""

    tensors: Bytes
    values: bytes
    frozen: Bytes
    layouts: list[Layout]


class Written(NamedTuple):
    """A rank's answer when it has written: the facts on its part and on its file of frozen weights,
    if it has one, and the layouts that it was to send, by number."""

    part: FileFacts
    frozen: FileFacts | None
    layouts: dict[int, Layout]


def payload_of(content: Content, node: str) -> tuple[Claim, Payload]:
    """Return the claim of a rank on `node`, and the bytes that it is to write of `content`. The
    content's buffer has been waited for; the copies of frozen weights are waited for here."""
    tensors, kinds = content.buffer.bytes, [content.buffer.pieces]
    frozen: Bytes = ()
    if content.frozen:
        kinds.append(content.frozen.pieces)
        if content.frozen.buffer:
            content.frozen.buffer.wait()
            frozen = content.frozen.buffer.bytes
    layouts, coordinates = zip(*map(layout_of, kinds), strict=True)
    payload = Payload(tensors, dump(content.rank_values), frozen, list(layouts))
    claim = Claim(
        node,
        tensors=_size_of(tensors),
        values=len(payload.values),
        frozen=_size_of(frozen),
        coordinates=coordinates,
        layouts=tuple(map(digest_of, layouts)),
        stream=content.stream,
        objects=tuple(content.rank_values.get("objects", ())),
        has_tree="tree" in content.rank_values,
    )
    return claim, payload


def write_payload(
    payload: Payload, draft: Path, plan: Plan, rank: int, content: Content, weights: FrozenWeights
) -> Written | None:
    """Write a rank's part into a draft, as planned, and a file of its frozen weights, which is a
    link if they have not changed; `weights` notes that file. Return the facts on both, or None if
    tensors in `content.trained` are not finite. Raise OSError if the disk refuses."""
    part = plan.parts[rank]
    with ThreadPoolExecutor(1) as pool:  # while the disk is busy
        is_finite = pool.submit(content.buffer.is_finite, content.trained)
        padding = bytes(part.size - part.tensors - part.values)
        facts = disk.write_file(
            draft / part.file,
            *payload.tensors,
            payload.values,
            padding,
            offset=part.offset,
            ends=plan.is_last(rank),
        )
        frozen = None
        if content.frozen:
            path = draft / FROZEN.format(rank)
            written = disk.write_file(path, *payload.frozen) if payload.frozen else None
            frozen = weights.add(content.frozen, path, written)
    numbers = plan.senders.get(rank, ())
    layouts = dict(zip(part.layouts, payload.layouts, strict=True))
    answer = Written(facts, frozen, {number: layouts[number] for number in numbers})
    return answer if is_finite.result() else None


def _size_of(parts: Bytes) -> int:
    """Return the number of bytes in all parts together."""
    return sum(map(len, parts))
