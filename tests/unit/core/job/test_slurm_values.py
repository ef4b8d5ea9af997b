"""Times, signals and array indexes in Slurm's forms."""

from __future__ import annotations

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_values import (
    array_indexes,
    gpus_of,
    least_cpus,
    parse_signal,
    parse_time,
    slurm_seconds,
)


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
    ("text", "seconds"),
    [("1-02:03:04", 93784), ("02:03:04", 7384), ("UNLIMITED", None), ("", None)],
)
def test_a_time_of_slurms_may_be_none(text: str, seconds: int | None) -> None:
    assert slurm_seconds(text) == seconds


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
        ("SIGHUP@90", ("HUP", 90)),
        ("1", ("HUP", 60)),
    ],
)
def test_signals_are_parsed_in_all_of_sbatchs_forms(text: str, expected: tuple[str, int]) -> None:
    assert parse_signal(text) == expected


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", ()),
        ("gpu:4", (("", 4),)),
        ("gpu:a100:4(S:0-1)", (("a100", 4),)),
        ("gpu:a100:2(S:0,1),gpu:a100_3g.20gb:4(S:1),nvme:1", (("a100", 2), ("a100_3g.20gb", 4))),
        ("craynetwork:4,gpu:h100:8(IDX:0-7)", (("h100", 8),)),
        ("gpu:no_consume:2,shard:8", (("", 2),)),
        ("gpu:gh200:no_consume:4", (("gh200", 4),)),
        ("gpu:2080ti:8,gpu:1080:4(S:0-1)", (("2080ti", 8), ("1080", 4))),
        ("gpu:1g.10gb:7", (("1g.10gb", 7),)),
        ("gpu:2080ti", (("2080ti", 1),)),
        ("gpu:3090", (("", 3090),)),
        ("gpu", (("", 1),)),
        ("gpumem:80,mps:400", ()),
    ],
)
def test_gpus_of_a_node_are_parsed(gres: str, gpus: tuple[tuple[str, int], ...]) -> None:
    assert gpus_of(gres) == gpus


@pytest.mark.parametrize(
    ("text", "cpus"), [("64(x2),48", 48), ("8", 8), ("36,72(x12)", 36), ("", 1), ("4(x16)", 4)]
)
def test_the_smallest_node_sets_the_cpus(text: str, cpus: int) -> None:
    assert least_cpus(text) == cpus
