from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint import save as saver_module
from unit.fakes import Clock, stop_clock
from unit.training.checkpoint.fakes import Make, claim_run, make_saver


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return claim_run(tmp_path)


@pytest.fixture
def make(run: RunFolder) -> Make:
    return partial(make_saver, run)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, saver_module)
