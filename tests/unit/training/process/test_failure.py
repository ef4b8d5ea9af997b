"""The end of a worker by an exception."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.training.process.environment import DistEnv
from hpc_ddp.training.process.failure import FailureHook


def test_a_forked_process_records_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread of a loader worker may end by an error once the rank has left."""
    hook = FailureHook(DistEnv(), "n1")
    hook.journal = Journal(tmp_path / "rank-0.jsonl", "rank-0")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    error = ConnectionResetError("by peer")
    hook(type(error), error, None)  # and the process goes on
    assert "ConnectionResetError: by peer" in capsys.readouterr().err
    assert not (tmp_path / "rank-0.jsonl").exists()
