"""The nodes' records of the end of an attempt: failures, and where the ranks stood in a hang.

Half-written and damaged files are left out.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from hpc_ddp.core.errors import COMMUNICATION_ERROR
from hpc_ddp.core.file_io import SmallFile, parse_object, read_json, read_small_below, read_tail
from hpc_ddp.core.job.attempt_folder import AttemptFolder, NodeFolder
from hpc_ddp.core.journal.fields import read_fields

TAIL_BYTES = 32 * 1024


@dataclass(frozen=True)
class RecordedFailure:
    """A rank (None: torchrun itself) that did not end well. `error` is '' where it wrote none,
    `code` the exit code, negative for a signal, `time` in unix seconds, 0.0 where not known."""

    rank: int | None
    node: str
    error: str
    code: int = 1
    time: float = 0.0

    @property
    def was_terminated(self) -> bool:
        """Whether it ended by SIGTERM, as a supervisor ends it once another rank has failed."""
        return self.code in (-signal.SIGTERM, 128 + signal.SIGTERM)

    @property
    def is_consequence(self) -> bool:
        """Whether it probably follows from another failure: a lost connection, or SIGTERM."""
        return self.was_terminated or bool(COMMUNICATION_ERROR.search(self.error))


def tail(path: Path) -> str:
    """Return the last `TAIL_BYTES` of a log, without noise and marks of ranks (`read_tail`); ''
    where it can't be read."""
    return read_tail(path, TAIL_BYTES)


def read_ends(attempt: AttemptFolder) -> tuple[list[RecordedFailure], dict[int, str]]:
    """Return the failures that the nodes of an attempt have recorded, and, after a hang, where each
    rank stood: the line of the user's code by rank, as ``train.py line 7``.

    Most of thousands of ranks stand at the same place, so each stack is parsed once. Raise OSError
    where the attempt's folder can't be listed.
    """
    failures: list[RecordedFailure] = []
    hang_places: dict[int, str] = {}
    for name, _, files in read_small_below(attempt.path, _is_of_the_end):
        node = attempt.node(name)
        failures += _read_failures(node, files)
        hang_places |= _hang_places_in(node, files)
    return failures, hang_places


def _is_of_the_end(name: str) -> bool:
    """Return whether a node's file is a record of its end or the stacks of a rank."""
    return name.startswith(("record", "stack-rank-"))


def _content(node: NodeFolder, name: str, small: SmallFile | None) -> bytes:
    """Return the last `TAIL_BYTES` of a node's file: of `small`, its content, or, where that is
    None, of the file on disk as `tail` has it; b'' where it can't be read."""
    return small.content[-TAIL_BYTES:] if small else tail(node.path / name).encode()


def _record(node: NodeFolder, name: str, small: SmallFile | None) -> dict[str, Any]:
    """Return the object in a node's record. With `small`, the file's content, raise ValueError
    where it is damaged. Where `small` is None the file is read, and {} returned where it is
    damaged."""
    return parse_object(small.content) if small else read_json(node.path / name)


def _read_failures(
    node: NodeFolder, files: Mapping[str, SmallFile | None]
) -> list[RecordedFailure]:
    """Return the failures in those of a node's files that are records (``record*.json``); damaged
    ones are left out. `files` are by name; a file for which there is None is read from disk."""
    failures = []
    for name, small in files.items():
        entries = None
        if name.startswith("record") and name.endswith(".json"):
            with suppress(ValueError):
                entries = _record(node, name, small).get("failures")
        if not isinstance(entries, list):
            continue
        for entry in entries:
            if isinstance(entry, dict):
                with suppress(ValueError):
                    recorded = read_fields(fields(RecordedFailure), entry)
                    failures.append(RecordedFailure(**{**recorded, "node": node.path.name}))
    return failures


_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.M)
_LIBRARY = re.compile(r"site-packages|/lib/python|/lib/hpc_ddp/|^<")


def _hang_places_in(node: NodeFolder, files: Mapping[str, SmallFile | None]) -> dict[int, str]:
    """Return the line of the user's code where each of the node's ranks stood, by rank, from those
    of its files that are stacks; ranks without such a line are left out."""
    places: dict[int, str] = {}
    for name, small in files.items():
        rank = name.removeprefix("stack-rank-").removesuffix(".txt")
        if rank.isdecimal():
            # The main thread comes last; its first line has its number.
            main_thread = _content(node, name, small).rpartition(b"hread 0x")[2]
            if place := _place_of(main_thread.partition(b"\n")[2]):
                places[int(rank)] = place
    return places


@cache
def _place_of(stack: bytes) -> str:
    """Return the innermost line of the user's code in a thread's stack; '' without one."""
    return place_in(stack.decode(errors="replace"), newest_first=True)


def place_in(text: str, newest_first: bool = False) -> str:
    """Return the innermost line of a traceback that is in the user's code, as ``train.py line 7``;
    '' without one. With `newest_first` the traceback begins with its innermost frame."""
    frames = list(_FRAME.finditer(text))
    if newest_first:
        frames.reverse()
    user_frames = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    if not user_frames:
        return ""
    return f"{Path(user_frames[-1]['file']).name} line {user_frames[-1]['line']}"
