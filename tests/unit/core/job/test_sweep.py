"""Arguments with several values become the tasks of an array."""

from __future__ import annotations

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.sweep import parse_sets


def test_each_combination_is_a_task_with_its_arguments() -> None:
    values = parse_sets(["lr=1e-3,1e-4", "--opt=a\\,b,c d"], 2)
    spec = JobSpec("train.py", args=("--epochs", "3"), **values)
    assert spec.array == "0-3%2"
    assert [list(trial.values()) for trial in spec.trials] == [
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
        ([f"{name}={','.join(map(str, range(400)))}" for name in "ab"], None, "160,000 trials"),
    ],
)
def test_a_malformed_sweep_is_refused(sets: list[str], bound: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JobSpec("train.py", **parse_sets(sets, bound))


def test_an_argument_that_is_swept_is_refused() -> None:
    for args in (("--lr", "0.1"), ("--lr=0.1",)):
        with pytest.raises(UsageError, match="lr is among the arguments, and the sweep adds"):
            JobSpec("train.py", args=args, **parse_sets(["lr=1,2"], None))
    JobSpec("train.py", args=("--lr-decay", "0.1"), **parse_sets(["lr=1,2"], None))


def test_a_parameter_of_hydra_has_no_dashes() -> None:
    values = parse_sets(["++opt.lr=1,2", "+seed=3"], None)
    assert JobSpec("train.py", **values).task(1).args == ("++opt.lr=2", "+seed=3")
    with pytest.raises(UsageError, match=r"opt\.lr is among the arguments, and the sweep adds"):
        JobSpec("train.py", args=("opt.lr=0",), **values)
