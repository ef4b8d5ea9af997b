from __future__ import annotations

import pytest

from hpc_ddp.training.checkpoint import schedule
from hpc_ddp.training.stops import consensus, signals
from unit.fakes import Clock, stop_clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, signals, consensus, schedule)
