"""Step times of all ranks are gathered and journaled."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_ddp.core.journal.stragglers import MOST_RANKS
from hpc_ddp.training import devices
from hpc_ddp.training.data.batch_plan import Position
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


def test_a_forward_in_a_graph_that_is_captured_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An event in the graph would be none of the stream: asking it is an error."""
    in_graph: list[bool] = []
    is_capturing = False

    class Mark:
        def __init__(self, device: torch.device, timed: bool) -> None:
            in_graph.append(is_capturing)

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Mark) -> float:
            return 1.0

    module = SimpleNamespace(is_current_stream_capturing=lambda: is_capturing)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(devices, "mark", Mark)
    group: Any = Gathering()
    journal: Any = SimpleNamespace(write_later=id)
    timer = StepTimer(group, journal, Position(), torch.device("cuda", 0), ["a", "b"])
    timer.has_ddp = True
    timer.start_step()
    is_capturing = True
    timer.end_forward()
    is_capturing = False
    timer.end_step()
    assert timer._samples == 0
    timer._next_sample = 0.0
    timer.start_step()
    timer.end_forward()
    timer.end_step()
    assert timer._samples == 1
    assert not any(in_graph)


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
