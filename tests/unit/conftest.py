from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_ddp.core import file_io
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from tests.raw_events import raw
from unit.fakes import Slurm


@pytest.fixture(autouse=True)
def environment_is_kept() -> Iterator[None]:
    """A variable that a test leaves is one of all later tests of its process. torch sets one."""
    before = dict(os.environ)
    yield
    left = os.environ.items() ^ before.items()
    assert {name for name, _ in left} <= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


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
    return run.claim_attempt({"nodes": ["n1", "n2", "n3"]}, lambda identity: False)


@pytest.fixture
def links_are_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the test makes belongs to another user from now on."""
    monkeypatch.setattr(file_io, "ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A private folder with a key and a journal."""
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "key").write_text("secret\n")
    (folder / "keys.jsonl").write_text('{"event": "finished", "time": 1}\n')
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A submitted run without an attempt."""
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    run.journal("submit").write(raw("submitted", backend="slurm"))
    return run
