"""Processes that a test starts in the background, and that end with it, also where it fails."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

ASKED = 60  # times, a second apart

_started: list[subprocess.Popen[Any]] = []


def start_child(argv: Sequence[str], **words: Any) -> subprocess.Popen[Any]:
    """Start a process, with the keywords of Popen."""
    process: subprocess.Popen[Any] = subprocess.Popen(argv, **words)
    _started.append(process)
    return process


def end_children() -> None:
    """End the processes that still run and close their pipes."""
    while _started:
        with _started.pop() as process:
            for _ in range(ASKED):
                if process.poll() is not None:
                    break
                process.terminate()  # the second time a dry run ends at once
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            process.kill()
