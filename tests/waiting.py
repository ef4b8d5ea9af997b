"""How tests wait: for an event, with one generous limit that names the event that did not come."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

LIMIT_S = 600.0  # far more than a busy machine needs; only a failure takes that long


def wait_until(
    condition: Callable[[], object],
    event: str,
    describe: Callable[[], object] = str,
    pause_s: float = 0.02,
) -> None:
    """Return once `condition` holds; fail with `event`, and what `describe` returns, if it never
    does."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {LIMIT_S:g} s: {event}\n{describe()}")
        time.sleep(pause_s)
