"""Settings that lines of a script change a second time at a resume are put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from hpc_ddp.training.data.rerun_lines import Settings, _is_equal


def test_settings_and_schedulers_are_put_back_with_a_line_for_each() -> None:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    rate = torch.tensor(0.5)
    groups = [{"params": [weights[0]], "lr": rate}, {"params": [weights[1]], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups)
    plain = torch.optim.SGD(weights, lr=1.0)
    scheduler = StepLR(plain, 1)
    settings = Settings({"opt": optimizer, "plain": plain, "sched": scheduler, "x": 3})
    lines: list[str] = []
    settings.put_back(lines.append)
    assert lines == []
    rate.fill_(0.1)
    optimizer.param_groups[1]["lr"] *= 0.1
    plain.step()
    scheduler.step()
    settings.put_back(lines.append)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    assert (optimizer.param_groups[1]["lr"], plain.param_groups[0]["lr"]) == (0.25, 1.0)
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (0, [1.0])
    assert [line.partition(" is ")[0] for line in lines] == [
        "opt: lr",
        "plain: lr",
        "sched: last_epoch",
    ]


class Curve:
    """An object of a scheduler's that has no comparison of its own."""

    def __init__(self) -> None:
        self.points = np.ones(3)


class Annealing(StepLR):
    """A scheduler of the script's own, whose state is no plain numbers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.curve, self.best = Curve(), float("nan")
        super().__init__(optimizer, 1)


def test_a_state_of_arrays_and_objects_is_compared_by_what_they_hold() -> None:
    scheduler = Annealing(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    settings = Settings({"sched": scheduler})
    lines: list[str] = []
    settings.put_back(lines.append)
    assert lines == []
    scheduler.curve.points[1] = 2
    settings.put_back(lines.append)
    assert scheduler.curve.points.tolist() == [1, 1, 1]
    assert [line.partition(" is ")[0] for line in lines] == ["sched: curve"]


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["array", "tensor"])
def test_arrays_are_equal_by_shape_and_content(make: Any) -> None:
    """NaN equals NaN; an array that has grown is another one."""
    nan, one = float("nan"), make([1.0])
    assert _is_equal(make([1.0, nan]), make([1.0, nan]))
    assert not _is_equal(make([1.0, nan]), make([1.0, 2.0]))
    assert not _is_equal(one, make([1.0, 1.0]))
    assert not _is_equal(make([1.0, 2.0]), make([1.0, 2.0, 3.0]))
    assert _is_equal(make([True]), make([True]))


class Warmup:
    """A scheduler of the script's own class."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_own_schedulers_are_put_back() -> None:
    warmup = Warmup()
    settings = Settings({"model": torch.nn.Linear(1, 1), "warmup": warmup})
    lines: list[str] = []
    warmup.step()
    settings.put_back(lines.append)
    assert warmup.count == 0
    assert [line.partition(",")[0] for line in lines] == ["warmup: count is 0 again"]


class Iterated(Warmup):
    """A data set or sampler, which goes on by itself."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


@pytest.mark.parametrize(
    ("state", "count"),
    [(torch.zeros(3), 1), (np.zeros(3), 1), (torch.zeros(2000), 0), (np.zeros(2000), 0), ({1}, 0)],
)
def test_objects_with_much_state_have_no_settings(state: Any, count: int) -> None:
    holder = Warmup()
    holder.state_dict = lambda: {"seen": [state]}  # type: ignore[method-assign,dict-item]
    assert len(Settings({"memory": holder})._objects) == count
    assert Settings({"sampler": Iterated(), "x": 3})._objects == {}


def test_a_rate_of_numpy_is_the_one_of_the_checkpoint() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1 * 0.7)
    settings = Settings({"opt": optimizer})
    optimizer.param_groups[0]["lr"] = np.float64(0.1) * 0.7
    lines: list[str] = []
    settings.put_back(lines.append)
    assert lines == []


def test_changes_before_the_first_loop_count() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    settings = Settings({"opt": optimizer})
    lines: list[str] = []
    optimizer.param_groups[0]["lr"] = 0.2
    settings.accept_changes(lines.append)
    assert lines == [
        "WARNING: opt: lr is 0.2, and 0.1 in the checkpoint: lines behind run.track have set it"
    ]
    optimizer.param_groups[0]["lr"] = 0.3
    settings.put_back(lines.append)
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_what_is_put_back_is_a_copy() -> None:
    holder = Warmup()
    count: Any = [1]
    holder.count = count
    settings = Settings({"meter": holder})
    for _ in range(2):
        cleared: Any = holder.count
        cleared.clear()
        settings.put_back(lambda line: None)
        assert str(holder.count) == "[1]"
