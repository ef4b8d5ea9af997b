from __future__ import annotations

import pytest

from hpc_ddp import slurm
from unit.fakes import Clock, stop_clock
from unit.slurm.fakes import HEADER, SCRIPT


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, slurm)


@pytest.fixture(autouse=True)
def _script(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("job"))
    SCRIPT.write_text(HEADER)
