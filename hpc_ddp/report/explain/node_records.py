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
    """A failure of a rank (None: of torchrun itself). `error` is '' where the process wrote none;
    `code` is the exit code, negative for a signal; `time` is in unix seconds, 0.0 where it is not
    known."""

    rank: int | None
    node: str
    error: str
    code: int = 1
    time: float = 0.0

    @property
    def was_terminated(self) -> bool:
        """Whether the process ended by SIGTERM, with which a supervisor ends workers once another
        rank has failed."""
        return self.code in (-signal.SIGTERM, 128 + signal.SIGTERM)

    @property
    def is_consequence(self) -> bool:
        """Whether the failure probably follows from another one: a lost connection, or SIGTERM."""
        return self.was_terminated or bool(COMMUNICATION_ERROR.search(self.error))


def read_log_end(path: Path) -> str:
    """Return the last `TAIL_BYTES` of a log as text, without noise and marks of ranks (see
    `read_tail`); '' where it can't be read."""
    return read_tail(path, TAIL_BYTES)


def read_ends(attempt: AttemptFolder) -> tuple[list[RecordedFailure], dict[int, str]]:
    """Return the failures that the nodes of an attempt have recorded; and for each rank that was in
    a hang, by its number, the line of the user's code where it stood, as ``train.py line 7``. Raise
    OSError where the attempt's folder can't be listed."""
    failures: list[RecordedFailure] = []
    hang_places: dict[int, str] = {}
    for name, _, files in read_small_below(attempt.path, _is_of_the_end):
        node = attempt.node(name)
        failures += _read_failures(node, files)
        hang_places |= _read_hang_places(node, files)
    return failures, hang_places


def _is_of_the_end(name: str) -> bool:
    """Return whether a node's file is a record of its end or the stacks of a rank."""
    return name.startswith(("record", "stack-rank-"))


def _read_content(node: NodeFolder, name: str, small: SmallFile | None) -> bytes:
    """Return the last `TAIL_BYTES` of the file `name` of a node. They come from `small`, the file's
    content; where that is None the file is read (`read_log_end`), b'' where that fails."""
    return small.content[-TAIL_BYTES:] if small else read_log_end(node.path / name).encode()


def _read_record(node: NodeFolder, name: str, small: SmallFile | None) -> dict[str, Any]:
    """Return the object in the record `name` of a node. It comes from `small`, the file's content:
    raise ValueError where that is damaged. Where `small` is None the file is read: return {} where
    it is damaged."""
    return parse_object(small.content) if small else read_json(node.path / name)


def _read_failures(
    node: NodeFolder, files: Mapping[str, SmallFile | None]
) -> list[RecordedFailure]:
    """Return the failures in a node's records, the files ``record*.json`` among `files` (content by
    name; a file with None is read from disk). Damaged records and failures are left out."""
    failures = []
    for name, small in files.items():
        entries = None
        if name.startswith("record") and name.endswith(".json"):
            with suppress(ValueError):
                entries = _read_record(node, name, small).get("failures")
        if not isinstance(entries, list):
            continue
        for entry in entries:
            if isinstance(entry, dict):
                with suppress(ValueError):
                    values = read_fields(fields(RecordedFailure), entry)
                    # A failure in a record names no node.
                    failures.append(RecordedFailure(**{**values, "node": node.path.name}))
    return failures


_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.M)
_LIBRARY = re.compile(r"site-packages|/lib/python|/lib/hpc_ddp/|^<")


def _read_hang_places(node: NodeFolder, files: Mapping[str, SmallFile | None]) -> dict[int, str]:
    """Return the line of the user's code where each of the node's ranks stood, by rank, from the
    stacks ``stack-rank-R.txt`` among `files` (as in `_read_failures`); ranks without such a line
    are left out."""
    places: dict[int, str] = {}
    for name, small in files.items():
        rank = name.removeprefix("stack-rank-").removesuffix(".txt")
        if rank.isdecimal():
            # Each thread begins with a line "Thread 0x…" or "Current thread 0x…"; the main thread
            # comes last.
            main_thread = _read_content(node, name, small).rpartition(b"hread 0x")[2]
            if place := _user_line_of_stack(main_thread.partition(b"\n")[2]):
                places[int(rank)] = place
    return places


@cache  # most of thousands of ranks stand at the same place
def _user_line_of_stack(stack: bytes) -> str:
    """Return the innermost line of the user's code in a thread's stack; '' without one."""
    return find_user_line(stack.decode(errors="replace"), newest_first=True)


def find_user_line(text: str, newest_first: bool = False) -> str:
    """Return the innermost line of a traceback that is in the user's code, as ``train.py line 7``;
    '' without one. With `newest_first` the traceback begins with its innermost frame."""
    frames = list(_FRAME.finditer(text))
    if newest_first:
        frames.reverse()
    user_frames = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    if not user_frames:
        return ""
    return f"{Path(user_frames[-1]['file']).name} line {user_frames[-1]['line']}"
