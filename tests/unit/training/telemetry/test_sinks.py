"""Progress lines on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from hpc_ddp.training.telemetry import sinks
from hpc_ddp.training.telemetry.sinks import ProgressLines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("log", [io.StringIO(), Terminal()])
def test_progress_is_shown_at_intervals(monkeypatch: pytest.MonkeyPatch, log: io.StringIO) -> None:
    monkeypatch.setattr("sys.stderr", log)
    ProgressLines().end()
    quiet = ProgressLines()
    quiet.show({"step": 1})
    quiet.end()
    assert not log.getvalue()
    monkeypatch.setattr(sinks, "TERMINAL_S" if log.isatty() else "EVERY_S", 0.0)
    progress = ProgressLines()
    progress.show({"step": 1, "total_steps": 3, "loss": 2.0})
    progress.show({"step": 2, "total_steps": 3, "loss": 0.25})
    progress.end()
    first, last = "step 1/3  loss 2", "step 2/3  loss 0.25  0:00:00 left"
    assert log.getvalue() == f"{first}\n{last}\n{last}\n"
