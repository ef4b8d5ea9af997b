"""Step times of all ranks are gathered and journaled."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from hpc_ddp.core.journal.stragglers import MOST_RANKS
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.telemetry.step_timing import StepTimer


class Gathering:
    """A control group of some ranks: what is gathered is there after the wait."""

    rank = 0

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size

    def start_gather(self, values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        self.sent = values
        self._rows = [torch.zeros_like(values) for _ in range(self.world_size)]
        return self._rows, self

    def wait(self) -> None:
        for row in self._rows:
            row.copy_(self.sent)


def test_gathered_step_times_are_written_at_the_next_report() -> None:
    written: list[dict[str, Any]] = []
    journal: Any = SimpleNamespace(write_later=lambda event: written.append(event.to_fields()))
    group: Any = Gathering()
    timer = StepTimer(group, journal, Position(step=4), torch.device("cpu"), ["a", "b"])
    timer.start_step()
    timer.end_step()
    timer.gather()
    timer.report()
    assert [(fields["step"], fields["steps"], fields["node"]) for fields in written] == [
        (4, 1, "a")
    ]


def test_the_step_times_of_many_ranks_are_a_summary() -> None:
    written: list[dict[str, Any]] = []
    journal: Any = SimpleNamespace(write_later=lambda event: written.append(event.to_fields()))
    group: Any = Gathering(8192)
    timer = StepTimer(group, journal, Position(step=4), torch.device("cpu"), ["a"] * 8192)
    timer.start_step()
    timer.end_step()
    timer.gather()
    timer.report()
    (fields,) = written
    assert len(fields["ranks"]) == len(fields["data_s"]) == MOST_RANKS
    assert len(json.dumps(fields)) < 1200  # bytes
