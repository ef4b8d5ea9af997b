"""Waiting out a shared disk that is full, read-only, or gone for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0


def patiently(act: Callable[[], T]) -> T:
    """Return what `act` returns; while it raises OSError, try again each second.

    For the few things that an attempt's end hangs on. `PATIENCE_S` after the first failure the
    error is raised: so reading a large file, which takes longer than that, is tried twice.
    """
    give_up: float | None = None
    while True:
        try:
            return act()
        except OSError:
            give_up = give_up or time.monotonic() + PATIENCE_S
            if time.monotonic() > give_up:
                raise
            time.sleep(1)
