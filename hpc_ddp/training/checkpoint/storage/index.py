"""The parts of a checkpoint: where each rank writes its own, and where a reader finds them.

Ranks of a node write into one file, each from its own offset on, where a checkpoint would have more
than `MOST_FILES` otherwise: a parallel file system makes files one by one. With fewer each rank has
a file of its own, since a file may lie on one of its servers only.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import READER_THREADS, open_data, patiently
from hpc_ddp.training.checkpoint.state import merge_trees
from hpc_ddp.training.checkpoint.storage.layout import Cut, Layout, LayoutEntry, Shape
from hpc_ddp.training.checkpoint.storage.resharding import Part, Reader

STATE = "state.pt"
FILE = "rank-{}.bin"  # named after the first rank that writes into it
FROZEN = "frozen-{}.bin"
INDEX = "index"  # key of the index among the shared values
MOST_FILES = 64  # with parts, or one for each node where there are more nodes
PAGE = 4096  # bytes; parts of two ranks share no page of the cache


class Claim(NamedTuple):
    """The amount that a rank is to write, sent to rank 0 before the rank writes.

    Attributes
    ----------
    node
        name of the rank's node
    tensors
        bytes of its tensors
    values
        bytes of its plain values, which come behind the tensors
    frozen
        bytes that it writes into a file of frozen weights; 0 without a file, and where it is a link
    coordinates
        the rank's, one tuple for each of its layouts
    layouts
        digests of the layout of its part, and of its file of frozen weights, if it has one
    stream
        number of its random generators
    objects
        names of the objects of which each rank has its own
    has_tree
        whether its values have the tree of a stage of a pipeline
    """

    node: str = ""
    tensors: int = 0
    values: int = 0
    frozen: int = 0
    coordinates: tuple[Shape, ...] = ()
    layouts: tuple[bytes, ...] = ()
    stream: int = 0
    objects: tuple[str, ...] = ()
    has_tree: bool = False


class RankPart(NamedTuple):
    """A rank's part of a checkpoint.

    The rank's tensors are the `tensors` bytes of the file `file` from byte `offset` on, its plain
    values the `values` bytes behind them. `layouts` are the numbers of its layouts in the index.
    The other fields are as in `Claim`.
    """

    file: str
    offset: int
    tensors: int
    values: int
    coordinates: tuple[Shape, ...]
    layouts: tuple[int, ...]
    stream: int
    has_tree: bool

    @property
    def size(self) -> int:
        """The bytes of the part in its file, rounded up to whole pages."""
        return -(-(self.tensors + self.values) // PAGE) * PAGE  # -(-a // b) rounds up


@dataclass(frozen=True)
class Plan:
    """The places where the ranks write.

    Attributes
    ----------
    parts
        of the ranks, by rank
    objects
        names of the objects of which each rank has its own
    senders
        by rank, the numbers of the layouts that it sends to rank 0; of equal layouts the first rank
        sends its own
    """

    parts: list[RankPart]
    objects: list[str]
    senders: dict[int, list[int]]

    def is_last(self, rank: int) -> bool:
        """Return whether a rank's part is the last one in its file."""
        file, offset = self.parts[rank][:2]
        return all(part.file != file for part in self.parts if part.offset > offset)


def plan_of(claims: Sequence[Claim]) -> Plan:
    """Return the plan of where the ranks write, from the ranks' `claims`, by rank. Layouts get
    numbers in the order in which they first occur."""
    numbers: dict[bytes, int] = {}  # by a layout's digest
    senders: dict[int, list[int]] = {}
    for rank, claim in enumerate(claims):
        for digest in claim.layouts:
            if digest not in numbers:
                numbers[digest] = len(numbers)
                senders.setdefault(rank, []).append(numbers[digest])
    first_ranks = _first_ranks([claim.node for claim in claims])
    ends = dict.fromkeys(first_ranks, 0)  # of each file so far, in bytes
    parts = []
    for claim, first in zip(claims, first_ranks, strict=True):
        layouts = tuple(numbers[digest] for digest in claim.layouts)
        part = RankPart(
            FILE.format(first),
            ends[first],
            claim.tensors,
            claim.values,
            claim.coordinates,
            layouts,
            claim.stream,
            claim.has_tree,
        )
        parts.append(part)
        ends[first] += part.size
    return Plan(parts, sorted({name for claim in claims for name in claim.objects}), senders)


def _first_ranks(nodes: Sequence[str]) -> list[int]:
    """Return, for each rank, the first rank that writes into the same file. `nodes` has the ranks'
    nodes, by rank. As few ranks of a node share a file as `MOST_FILES` files allow; with more nodes
    than that each node has one file."""
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    sizes, most = list(map(len, members.values())), max(MOST_FILES, len(members))
    # The least number of ranks per file: a node of `size` ranks has size / n files, rounded up.
    share = next(n for n in count(1) if sum(-(-size // n) for size in sizes) <= most)
    places = {rank: place for ranks in members.values() for place, rank in enumerate(ranks)}
    return [members[node][places[rank] // share * share] for rank, node in enumerate(nodes)]


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint, as one rank has read it for all.

    Attributes
    ----------
    shared
        the plain values that the ranks shared
    parts
        those of the ranks that wrote the checkpoint, by rank
    layouts
        those of the parts, by number
    objects
        names of the objects of which each rank had its own
    """

    shared: dict[str, Any]
    parts: list[RankPart]
    layouts: list[Layout]
    objects: list[str]

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the checkpoint."""
        return len(self.parts)

    def first_of_stream(self, stream: int) -> int | None:
        """Return the first rank whose random generators have the number `stream`; None if no rank's
        do."""
        return next((rank for rank, part in enumerate(self.parts) if part.stream == stream), None)


def dump_index(plan: Plan, layouts: Mapping[int, Layout], shared: Mapping[str, Any]) -> bytes:
    """Return the content of the file `STATE`: the index of a checkpoint whose parts lie as planned,
    and the plain values that the ranks share, `shared`. `layouts` has all layouts by number, from 0
    on."""
    rows = {number: list(map(_plain, layout)) for number, layout in layouts.items()}
    index = {
        "parts": list(map(tuple, plan.parts)),
        "layouts": [rows[number] for number in range(len(rows))],
        "objects": plan.objects,
    }
    return dump({**shared, INDEX: index})


def _plain(entry: LayoutEntry) -> tuple[Any, ...]:
    """Return an entry of a layout in types that ``weights_only`` loads again."""
    return (*entry[:4], tuple(map(tuple, entry.cuts)))


def read_index(folder: Path) -> Index:
    """Return the index of a checkpoint that has been verified. The trees of all stages of a
    pipeline are joined in it.

    Raises
    ------
    HpcDdpError
        another version of hpc-ddp has written the checkpoint, or its index names a file that is not
        in the manifest
    OSError
        a file can't be read
    ValueError
        the manifest is damaged; torch's and other errors come through for another content
    """
    manifest = checkpoints.read_manifest(folder)
    if (version := manifest.get("format")) != checkpoints.FORMAT:
        raise HpcDdpError(
            f"{folder} has format {version}; this hpc-ddp reads format {checkpoints.FORMAT}",
            hint="go on with the hpc-ddp that wrote it",
        )
    shared = _load(patiently((folder / STATE).read_bytes))
    index = shared.pop(INDEX)
    layouts = [
        [
            LayoutEntry(name, dtype, shape, box, tuple(Cut(*cut) for cut in cuts))
            for name, dtype, shape, box, cuts in rows
        ]
        for rows in index["layouts"]
    ]
    parts = [RankPart(*row) for row in index["parts"]]
    # A checkpoint may be another user's: no part of it may be a file elsewhere, of this user's.
    if unlisted := {STATE, *(part.file for part in parts)} - manifest["files"].keys():
        raise HpcDdpError(
            f"the index of {folder} names {sorted(map(str, unlisted))[0]!r}, which is none of its"
            " files: hpc-ddp has not written it so",
            hint=f"go on from an earlier checkpoint: move {folder.name} elsewhere",
        )
    stages = [part for part in parts if part.has_tree]
    with ThreadPoolExecutor(READER_THREADS) as pool:  # a parallel file system opens many at a time
        for values in pool.map(partial(read_values, folder), stages):
            shared["tree"] = merge_trees(shared["tree"], values["tree"])
    return Index(shared, parts, layouts, index["objects"])


def read_values(folder: Path, part: RankPart) -> dict[str, Any]:
    """Return the plain values that a rank had of its own, from its `part` of the checkpoint in
    `folder`. Raise OSError if the file can't be read for a minute, or ends too early; torch's
    errors come through for another content."""

    def read() -> bytes:
        with open_data(folder / part.file) as file:
            file.seek(part.offset + part.tensors)
            content = file.read(part.values)
        if len(content) < part.values:
            raise OSError(errno.EIO, f"{part.file} ends too early")
        return content

    return _load(patiently(read))


def reader_of(folder: Path, index: Index, rank: int | None) -> Reader:
    """Return a reader of a checkpoint's tensors. Among the tensors that each rank saved for itself
    it has those of `rank`; if `rank` is None, the buffers alone, as the stage's first rank had
    them."""
    parts, parts_of_rank = list[Part](), set[int]()
    for writer, part in enumerate(index.parts):
        # A rank has one layout or, with a file of frozen weights, two.
        places = ((folder / part.file, part.offset), (folder / FROZEN.format(writer), 0))
        for place, layout, coordinates in zip(places, part.layouts, part.coordinates, strict=False):
            if writer == rank:
                parts_of_rank.add(len(parts))
            parts.append(Part(*place, layout, coordinates, writer))
    return Reader(index.layouts, parts, parts_of_rank)


def dump(content: Mapping[str, Any]) -> bytes:
    """Return plain values and small tensors as bytes, for `_load`."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _load(content: bytes) -> dict[str, Any]:
    """Return the values of which `dump` has made `content`, with tensors on the CPU. Pickled code
    is never run; torch's errors for any other content come through."""
    values: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return values
