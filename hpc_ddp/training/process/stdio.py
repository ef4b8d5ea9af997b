"""Standard output and error that a full disk does not turn into errors of the script.

Under hpc-ddp both are a log on the disk of the run, and a print would raise there.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any


class _Patient(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:  # the text is lost
            return memoryview(data).nbytes


def make_patient() -> None:
    """Have this process's prints pass over what the disk refuses.

    A stream of the script's own in their place is left alone.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        if old is not getattr(sys, f"__{name}__"):
            continue
        raw: Any = _Patient(
            number, "wb", closefd=False
        )  # TextIOWrapper takes it, as `python -u` does
        new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)
        old.flush()
        setattr(sys, name, new)


def say(text: str) -> None:
    """Write a line to stderr from a thread that must not die of it."""
    with suppress(OSError):
        os.write(2, f"hpc-ddp: {text}\n".encode())
