"""One rank's part of a save: which tensors it has, its content, and its writing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpc_ddp.core.checkpoints import FileFacts
from hpc_ddp.training.checkpoint.rank_comparison import Inventory
from hpc_ddp.training.checkpoint.state import State
from hpc_ddp.training.checkpoint.storage import disk
from hpc_ddp.training.checkpoint.storage.frozen import FrozenPart, FrozenWeights
from hpc_ddp.training.checkpoint.storage.index import FROZEN, Claim, Plan, dump
from hpc_ddp.training.checkpoint.storage.layout import OWN, Layout, digest_of, layout_of
from hpc_ddp.training.checkpoint.storage.shards import (
    LocalShard,
    StagingBuffer,
    rows,
    shard,
    share_of,
    whole,
)
from hpc_ddp.training.models.dtensor import is_sharded, place_among_copies
from hpc_ddp.training.models.mesh import ParallelDims

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
    """A rank's answer when it has written: the facts on its part, and on its file of frozen weights
    (None without one); and those layouts, by number, that the plan has this rank send to rank 0."""

    part: FileFacts
    frozen: FileFacts | None
    layouts: dict[int, Layout]


def parts_of_rank(state: State, dims: ParallelDims) -> dict[str, LocalShard]:
    """Return the parts of the tensors that this rank (`dims`) writes, by name. All ranks of a stage
    have the same names in `state`, apart from private tensors. The rank writes

    - of a sharded tensor (FSDP2, tensor parallel) its own shard; of equal shards one rank writes
      its own (`_copies_to_write`)
    - of a private tensor, of which each rank has its own, all, as ``NAME@rank``
    - of replicated tensors whole rows, by its share of all bytes (`share_of`), of frozen ones apart
      from others
    - of a buffer its own, as ``NAME@rank``; the first rank of the stage writes ``NAME``, from which
      a run on another number of ranks goes on
    - of any other tensor all on the first rank of the stage, nothing on others.

    A part without numbers is left out, unless it is ``NAME@rank``, or on the first rank of the
    stage: so a tensor without any is stored once. Raise HpcDdpError for a DTensor with a pending
    reduction.
    """
    shared = {name: tensor.nbytes for name, tensor in state.equal.items()}
    rank, size = dims.stage_rank, dims.stage_size
    totals = Counter[bool]()  # bytes of frozen tensors (True), and of others (False)
    for name, nbytes in shared.items():
        totals[name in state.frozen] += nbytes
    # Begin and end of this rank's share, in bytes from the begin of the next tensor.
    edges = {is_frozen: share_of(total, rank, size) for is_frozen, total in totals.items()}
    copies = _copies_to_write(state, dims)
    parts: dict[str, LocalShard] = {}
    for name, tensor in state.tensors.items():
        if is_sharded(tensor):
            if name in copies:
                parts[name] = shard(tensor)
        elif name in state.private:
            parts[f"{name}{OWN}"] = whole(tensor)
        elif length := shared.get(name):
            low, high = edges[is_frozen := name in state.frozen]
            if part := rows(tensor, low, high):
                parts[name] = part
            edges[is_frozen] = (low - length, high - length)
        elif rank == 0:
            parts[name] = whole(tensor)
        elif name in state.buffers:
            parts[f"{name}{OWN}"] = whole(tensor)
    is_empty = {name: not part.numbers.numel() for name, part in parts.items()}
    if rank == 0:
        return parts
    return {name: p for name, p in parts.items() if name.endswith(OWN) or not is_empty[name]}


def _copies_to_write(state: State, dims: ParallelDims) -> set[str]:
    """Return the names of the DTensors of which this rank writes its shard. Raises as
    `parts_of_rank`.

    One of several ranks with equal shards, as those of replicas, writes a shard; such ranks share
    the shards out by bytes (`share_of`), frozen ones apart. All ranks compute this alike, without
    messages.
    """
    # By name: the group, the shard's bytes, this rank's number among the ranks with equal shards,
    # and their count. A group has the tensors that the same ranks share out.
    places: dict[str, tuple[Any, int, int, int]] = {}
    totals = Counter[Any]()  # bytes, by group
    for name, tensor in state.tensors.items():
        if is_sharded(tensor) and (place := place_among_copies(tensor, dims)):
            sharded: Any = tensor
            equals = tuple(placement.is_replicate() for placement in sharded.placements)
            group = sharded.device_mesh, equals, name in state.frozen
            nbytes = sharded.to_local().nbytes
            places[name] = group, nbytes, *place
            totals[group] += nbytes
    names, begins = set(), Counter[Any]()  # begins: of the next shard, among the group's bytes
    for name, (group, nbytes, number, count) in places.items():
        low, high = share_of(totals[group], number, count)
        # The rank in whose share a shard begins writes it; the first one writes an empty shard.
        if low <= begins[group] < high if nbytes else number == 0:
            names.add(name)
        begins[group] += nbytes
    return names


def payload_of(content: Content, node: str) -> tuple[Claim, Payload]:
    """Return the claim of a rank on `node`, and the bytes that it is to write of `content`. The
    caller has waited for the content's buffer; wait here for the copies of frozen weights, if they
    are to be written."""
    tensors, pieces_of_files = content.buffer.bytes, [content.buffer.pieces]
    frozen: Bytes = ()
    if content.frozen:
        pieces_of_files.append(content.frozen.pieces)
        if content.frozen.buffer:  # else a link to the file of an earlier save
            content.frozen.buffer.wait()
            frozen = content.frozen.buffer.bytes
    layouts, coordinates = zip(*map(layout_of, pieces_of_files), strict=True)
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
    """Write the part of `rank` into a draft, as planned, and a file of its frozen weights, if it
    has any: a link if they have not changed. Note this file in `weights`. Return the facts on both,
    or None if tensors in `content.trained` are not finite. Raise OSError if the disk refuses."""
    part = plan.parts[rank]
    with ThreadPoolExecutor(1) as pool:  # while the disk is busy
        is_finite = pool.submit(content.buffer.is_finite, content.trained)
        padding = bytes(part.size - part.tensors - part.values)  # up to a whole page
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
    layouts = dict(zip(part.layouts, payload.layouts, strict=True))
    to_send = plan.senders.get(rank, ())
    answer = Written(facts, frozen, {number: layouts[number] for number in to_send})
    return answer if is_finite.result() else None


def _size_of(parts: Bytes) -> int:
    """Return the number of bytes in all parts together."""
    return sum(map(len, parts))
