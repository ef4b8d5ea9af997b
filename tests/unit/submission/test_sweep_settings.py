"""Sweeps: from what was typed to the tasks, and what they use of a budget."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.slurm_values import array_indexes
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.core.journal.journal import node_seconds
from hpc_ddp.submission.sweep import settings
from tests.raw_events import typed


def test_each_combination_is_a_task_with_its_arguments() -> None:
    said = settings(["lr=1e-3,1e-4", "--opt=a\\,b,c d"], 2)
    spec = JobSpec("train.py", args=("--epochs", "3"), **said)
    assert spec.array == "0-3%2"
    assert [list(point.values()) for point in spec.trials] == [
        ["1e-3", "a,b"],
        ["1e-3", "c d"],
        ["1e-4", "a,b"],
        ["1e-4", "c d"],
    ]
    task = JobSpec.from_json(spec.to_json()).task(3)
    assert task.args == ("--epochs", "3", "--lr=1e-4", "--opt=c d")
    assert (task.array, task.trials) == ("3", [])


@pytest.mark.parametrize(
    ("sets", "bound", "message"),
    [
        ([], None, "no sweep"),
        (["lr"], None, "is not of the form"),
        (["lr=1", "lr=2"], None, "is said twice"),
        (["lr=1"], 0, "max-parallel is 0"),
        (["=1"], None, "no parameter"),
        (["lr="], None, "are not empty"),
        (["lr=1,,2"], None, "are not empty"),
        (["lr=1, 1"], None, "that differ"),
        (["a=1\n2"], None, "no parameter"),
        ([f"{name}={','.join(map(str, range(400)))}" for name in "ab"], None, "160,000 points"),
    ],
)
def test_what_is_no_sweep_is_said(sets: list[str], bound: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JobSpec("train.py", **settings(sets, bound))


@pytest.mark.parametrize(
    ("array", "indexes"),
    [("0-3%2", [0, 1, 2, 3]), ("1,3,10-20:5", [1, 3, 10, 15, 20]), ("7", [7])],
)
def test_indexes_of_an_array(array: str, indexes: list[int]) -> None:
    assert array_indexes(array) == indexes


@pytest.mark.parametrize("array", ["", "a", "1-", "1-3:0", "1;2", "\u0661"])
def test_what_is_no_array_is_said(array: str) -> None:
    with pytest.raises(UsageError, match="is no list of indexes"):
        array_indexes(array)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"array": "0-99999999999"}, "more than 100,000 tasks"),
        ({"array": "2", "sweep": {"lr": ("1", "2")}}, "indexes from 0 to 1"),
        ({"backend": "salloc", "sweep": {"lr": ("1", "2")}}, "runs inside one job"),
        ({"launcher": "srun", "nodes": "1-2"}, "accepted: a whole number"),
        ({"launcher": "srun", "srun": ("--ntasks=3",)}, "is set by hpc-ddp"),
        ({"launcher": "srun", "max_restarts": 1}, "without torchrun"),
        ({"torchrun": ("-h",)}, "is set by hpc-ddp"),
        ({"nodes": "\u0661"}, "accepted: a whole number from 1"),
        ({"nodes": 10**20}, "accepted: a whole number from 1"),
    ],
)
def test_what_can_not_be_is_said(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JobSpec("train.py", **values)


def _event(time: float, event: str, attempt: int, **more: Any) -> JournalEvent:
    return typed(event, time, attempt, **more)


def test_each_attempt_counts_its_nodes_until_its_verdict() -> None:
    events = [
        _event(100, "queued", 0),
        _event(110, "started", 0, nodes=["a", "b"]),
        _event(120, "verdict", 0),
        _event(150, "submitted", 0, first_attempt=1),
        _event(200, "started", 1, nodes=["a"]),
        _event(205, "metrics", 1),
    ]
    assert node_seconds(events) == 25
    assert node_seconds(events, now=210) == 30
    assert node_seconds([]) == 0
