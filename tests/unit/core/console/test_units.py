"""Amounts as text."""

from __future__ import annotations

import math

import pytest

from hpc_ddp.core.console.units import (
    brief_duration,
    byte_count,
    duration,
    measured,
    parse_age,
    plural,
    speed,
)
from hpc_ddp.core.errors import UsageError


def test_a_time_that_is_no_number_is_printed() -> None:
    assert (duration(math.inf), duration(math.nan)) == ("inf d", "nan d")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (119.0, "119 s"),
        (120.0, "2.0 min"),
        (3600.0, "60 min"),
        (5400.0, "90 min"),
        (9000.0, "2.5 h"),
        (36000.0, "10 h"),
        (5 * 86400.0, "5.0 d"),
        (1e9, "11574 d"),
    ],
)
def test_durations_have_two_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_times_sizes_speeds_and_counts_have_units() -> None:
    assert [brief_duration(s) for s in (0.31, 0.0045)] == ["0.31 s", "4.5 ms"]
    assert [brief_duration(s) for s in (0.0996, 9.96, 99.6)] == ["0.1 s", "10 s", "100 s"]
    assert [byte_count(n) for n in (0, 999, 4_200_000_000)] == ["0 B", "999 B", "4.2 GB"]
    assert [byte_count(n) for n in (999_949_999, 999_960_000)] == ["999.9 MB", "1.0 GB"]
    assert [byte_count(n) for n in (999.4, 999.7)] == ["999 B", "1.0 kB"]  # a mean, say
    assert [speed(s) for s in (850.0, 999.6, 12_400.0)] == ["850 MB/s", "1.0 GB/s", "12.4 GB/s"]
    assert [plural(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_measured_numbers_have_four_digits() -> None:
    numbers = (0.98611, 9999.4, 9999.7, 12345.6, math.nan, math.inf, -math.inf, None, 2.7e-5, -3e12)
    assert [measured(number) for number in numbers] == [
        "0.9861",
        "9999",
        "10,000",
        "12,346",
        "NaN",
        "∞",
        "−∞",
        "–",
        "2.7e−5",
        "−3e12",
    ]


def test_ages_are_parsed() -> None:
    assert parse_age("12h") == 43200
    assert parse_age("4w") == 28 * 86400
    with pytest.raises(UsageError, match="is no age"):
        parse_age("30")
