"""Messages to the user on stderr; stdout is data."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text with a replacement character for each control character by which it could
    change the terminal, and for each surrogate, which can't be printed."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """Return a text `printable`, with a blank for each end of a line and each tab: so a name or a
    reason of another user's run can't look like a line of its own."""
    return printable(re.sub(r"[\t\n]", " ", text))


def write_output(content: bytes) -> None:
    """Write bytes to the process's stdout, past Python's buffer. Where stdout takes no more, as on
    a full disk, the rest of the bytes is lost; nothing is raised."""
    unwritten = memoryview(content)
    with suppress(OSError):  # a full disk, or a pipe that has been closed
        while unwritten:
            unwritten = unwritten[os.write(1, unwritten) :]


def answer(content: str | int) -> None:
    """Print `content` to stdout for the batch script, between marks by which the script's
    `_answer_of` tells it from what a wrapper of Python prints."""
    print(f"<hpc-ddp>{content}</hpc-ddp>")


def say(text: str) -> None:
    """Print a text, made `printable`, as a line ``hpc-ddp: …`` to stderr. Where stderr can't be
    written, the line is lost, and nothing is raised.

    The job's output may lie on a disk that is full. A line that stays in Python's buffer would then
    turn the exit code of the process into 120, so it is written past the buffer.
    """
    line = f"hpc-ddp: {printable(text)}\n"
    with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        try:
            descriptor = sys.stderr.fileno()
        except OSError:  # no file, as in a notebook
            sys.stderr.write(line)
        else:
            sys.stderr.flush()
            os.write(descriptor, line.encode(errors="replace"))
