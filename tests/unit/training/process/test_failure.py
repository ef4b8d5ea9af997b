"""The end of a worker by an exception."""

from __future__ import annotations

import io
import os
import sys
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


def test_an_error_before_the_run_is_open_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of a connection between ranks: torch's hook is around ours as soon as there is a group,
    and shows what is printed once ours has returned."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    FailureHook(DistEnv(), "n1")(ValueError, ValueError("too early"), None)
    assert codes == [1]
    assert "ValueError: too early" in capfd.readouterr().err


def test_an_error_is_reported_without_the_folder_of_torchruns_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/no/such/folder/error.json")
    FailureHook(DistEnv(), "n1").report(ValueError("the script's"), "Traceback of the script\n")
    assert "Traceback of the script" in capsys.readouterr().err
