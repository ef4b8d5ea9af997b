"""Times, signals and array indexes in Slurm's forms."""

from __future__ import annotations

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_values import array_indexes, parse_signal, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1", 60),
        ("1:30", 90),
        ("1:00:00", 3600),
        ("1-2", 93600),
        ("1-2:30", 95400),
        ("1-2:30:15", 95415),
    ],
)
def test_a_time_is_parsed_into_seconds(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("array", "indexes"),
    [
        ("0-5%2", [0, 1, 2, 3, 4, 5]),
        ("1,3,10-20:5", [1, 3, 10, 15, 20]),
        ("4", [4]),
        ("0-7:3", [0, 3, 6]),
    ],
)
def test_indexes_of_an_array_are_listed(array: str, indexes: list[int]) -> None:
    assert array_indexes(array) == indexes
    assert JobSpec("t.py", array=array).indexes([30, *indexes]) == [*indexes, 30]


@pytest.mark.parametrize("text", ["5-2", "0-5%abc", "0-5%", "0-5%\u0663", "1,,2", "x"])
def test_a_malformed_list_of_indexes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no list of indexes"):
        array_indexes(text)


@pytest.mark.parametrize(
    ("array", "indexes"),
    [("0-3%2", [0, 1, 2, 3]), ("1,3,10-20:5", [1, 3, 10, 15, 20]), ("7", [7])],
)
def test_ranges_steps_and_limits_of_an_array_are_read(array: str, indexes: list[int]) -> None:
    assert array_indexes(array) == indexes


@pytest.mark.parametrize("array", ["", "a", "1-", "1-3:0", "1;2", "\u0661"])
def test_a_malformed_array_is_refused(array: str) -> None:
    with pytest.raises(UsageError, match="is no list of indexes"):
        array_indexes(array)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("USR1@90", ("USR1", 90)),
        ("B:SIGUSR2@600", ("USR2", 600)),
        ("10@30", ("USR1", 30)),
        ("sigterm", ("TERM", 60)),
    ],
)
def test_signals_are_parsed_in_all_of_sbatchs_forms(text: str, expected: tuple[str, int]) -> None:
    assert parse_signal(text) == expected
