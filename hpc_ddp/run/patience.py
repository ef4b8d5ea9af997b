"""Waiting out a shared disk that is full, read-only, or gone for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0


def patiently(act: Callable[[], T]) -> T:
    """Return what `act` returns; while it raises OSError, try again each second.

    For the few things that an attempt's end hangs on. After `PATIENCE_S` the error is raised.
    """
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            return act()
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(1)
