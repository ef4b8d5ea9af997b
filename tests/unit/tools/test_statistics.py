"""Intervals of shares."""

from __future__ import annotations

from tools.statistics import wilson_interval


def test_the_wilson_interval_is_computed() -> None:
    low, high = wilson_interval(25, 40)
    assert (round(low, 3), round(high, 3)) == (0.47, 0.758)
    assert wilson_interval(0, 0) == (0.0, 1.0)
