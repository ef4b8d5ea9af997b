from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_ddp.core.run_folder import AttemptFolder, RunFolder
from unit.fakes import Slurm


@pytest.fixture
def slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Stand-ins for Slurm's commands, first on PATH."""
    folder = tmp_path / "slurm-bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Slurm(folder)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    run = RunFolder(tmp_path / "name" / "run").make()
    return run.claim_attempt({"nodes": ["n1", "n2", "n3"]}, lambda info: False)
