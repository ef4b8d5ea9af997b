"""How tests wait: for an event, with one generous limit that names the event that did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT_S = 600.0  # far more than a busy machine needs; only a failure takes that long


def wait_until(
    condition: Callable[[], object],
    event: str,
    describe: Callable[[], object] = str,
    pause_s: float = 0.02,
    ended: Callable[[], object] = lambda: False,
) -> None:
    """Return once `condition` holds; fail with `event`, and what `describe` returns, if it never
    does.

    Where `ended` tells that what should bring the event has ended, it fails at once.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        is_last_look = ended()  # asked first: what came just before the end counts
        if condition():
            return
        if is_last_look:
            pytest.fail(f"ended without it: {event}\n{describe()}")
        if time.monotonic() > deadline:
            pytest.fail(f"not within {LIMIT_S:g} s: {event}\n{describe()}")
        time.sleep(pause_s)


def is_pending(pid: int, number: int) -> bool:
    """Tell whether a process has been sent a signal that it has not taken yet."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def pid_in(path: Path) -> int:
    """Return the process id in a worker's pid file, whether it still runs or not."""
    return int(path.read_text().split()[0])
