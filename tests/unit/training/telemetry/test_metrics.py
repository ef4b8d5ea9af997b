"""Metrics are written to the journal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.journal.events import FirstStep, Fresh, JournalEvent, MetricsLine
from hpc_ddp.core.journal.journal import Journal, read_events
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.telemetry import metrics as metrics_module
from hpc_ddp.training.telemetry.metrics import (
    Metrics,
    check_values,
    make_step_listener,
    read_number,
)
from tests.waiting import LIMIT_S


def test_metrics_are_written_rarely_and_at_the_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "rank-0")
    metrics = Metrics(journal, 2, ["a", "b"])
    for step in range(1, 100):
        loss = torch.tensor(float(step))
        metrics.add(Position(step=step), 16, {"loss": loss})
    metrics.flush()
    metrics.flush()
    journal.drain(LIMIT_S)
    first, *events = [event.to_line() for event in read_events(tmp_path)]
    assert (first["event"], first["step"], first["hosts"]) == ("first_step", 1, ["a", "b"])
    assert 1 <= len(events) <= 2
    assert (events[-1]["step"], events[-1]["loss"]) == (99, 99.0)
    assert "total_steps" not in events[-1]


def test_the_last_line_has_the_values_of_its_step(tmp_path: Path) -> None:
    """A graph's next run, as an evaluation's, writes over the loss, or takes its memory away."""
    lines = list[dict[str, Any]]()
    metrics = Metrics(Journal(tmp_path, "rank-0"), 1, ["a"], listeners=[lines.append])
    loss = torch.tensor(2.0)
    metrics.add(Position(step=1), 1, {"loss": loss})
    loss.zero_()
    metrics.flush()
    assert [line["loss"] for line in lines] == [2.0]


def test_a_loss_of_minus_zero_is_zero(tmp_path: Path) -> None:
    journal, shown = Journal(tmp_path, "rank-0"), list[dict[str, Any]]()
    metrics = Metrics(journal, 1, ["a"], listeners=[shown.append])
    metrics.add(Position(step=1), 1, {"loss": torch.tensor(-0.0), "lr": -0.0, "gain": -0.5})
    metrics.flush()
    journal.drain(LIMIT_S)
    assert [str(shown[0][name]) for name in ("loss", "lr", "gain")] == ["0.0", "0.0", "-0.5"]
    assert read_events(tmp_path)[-1].to_line()["loss"] == 0.0


def test_a_line_of_metrics_is_left_to_the_journals_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_module, "EVERY_S", 0.0)
    calls: list[tuple[str, str, int]] = []
    journal: Any = SimpleNamespace(
        write=lambda event: calls.append(("now", event.event, event.to_fields()["step"])),
        write_later=lambda event: calls.append(("later", event.event, event.to_fields()["step"])),
    )
    metrics = Metrics(journal, 1, ["a"])
    for step in (1, 2):
        metrics.add(Position(step=step), 4, {"loss": torch.tensor(1.0)})
    metrics.flush()
    assert calls == [("now", "first_step", 1), ("later", "metrics", 1), ("later", "metrics", 2)]


def test_a_hook_has_each_step_once_over_all_attempts(tmp_path: Path) -> None:
    journal = [
        *(
            MetricsLine({"step": step}, attempt=attempt)
            for attempt, step in ((0, 9), (1, 2), (1, 5))
        ),
        FirstStep(6, 1, ["a"], attempt=1),
    ]
    seen: list[tuple[int, dict[str, float]]] = []

    def feed(*history: JournalEvent) -> list[int]:
        seen.clear()
        listener = make_step_listener(lambda step, metrics: seen.append((step, metrics)), history)
        for step in (4, 5, 6, 10):
            listener({"step": step, "total_steps": 20, "loss": step / 2})
        return [step for step, _ in seen]

    assert feed() == [4, 5, 6, 10]
    assert seen[0] == (4, {"loss": 2.0})
    assert feed(*journal) == [10]
    assert feed(*journal, Fresh(1)) == [6, 10]  # what came before --fresh is another curve


def test_an_error_of_the_device_is_no_mistake_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CUDA error comes up at the first read after it; nothing is read to check a value."""

    def fail(tensor: torch.Tensor) -> float:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.Tensor, "item", fail)
    check_values({"loss": torch.ones(()), "count": torch.ones(1, dtype=torch.int64), "lr": None})
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        read_number("run.best", "value", torch.ones(1))


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        torch.ones(0),
        torch.ones((), dtype=torch.complex64),
        torch.ones((), device="meta"),
        numpy.ones(2),
        "1",
        [1.0],
    ],
)
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"run.step was given loss, .* that is no number"):
        check_values({"loss": value})
    with pytest.raises(UsageError, match=r"run.best was given value, .* that is no number"):
        read_number("run.best", "value", value)


@pytest.mark.parametrize("value", [2, True, numpy.float32(2), torch.tensor([[2]])])
def test_numbers_are_accepted(value: Any) -> None:
    check_values({"loss": value})
    assert read_number("run.best", "value", value) in (1.0, 2.0)
