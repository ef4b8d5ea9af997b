"""Beside a worker, on its node: py-spy is a stand-in, and the worker a process that sleeps."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_ddp.node import attach
from hpc_ddp.run.errors import HpcDdpError
from tests.waiting import wait_until


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[int]:
    """A process whose Python, by its own account, lies in `tmp_path`; of rank 0 there."""
    (tmp_path / "deep").mkdir()
    env = {"HPC_DDP_NODE_FOLDER": str(tmp_path), "RANK": "0", "MINE": "a=b", "HPC_DDP_RUN": "/r"}
    argv = [str(tmp_path / "python"), "600"]
    with subprocess.Popen(argv, executable="/bin/sleep", env=env, cwd=tmp_path / "deep") as process:
        # The kernel closes Popen's pipe a moment before the new program has its environment.
        wait_until(Path(f"/proc/{process.pid}/environ").read_bytes, "the worker's environment")
        (tmp_path / "rank-0.pid").write_text(str(process.pid))
        yield process.pid
        process.kill()


def _py_spy(folder: Path, code: int) -> None:
    (folder / "py-spy").write_text(f'#!/bin/bash\necho "$@"; exit {code}\n')
    (folder / "py-spy").chmod(0o755)


def test_py_spy_beside_the_workers_python_is_asked(
    tmp_path: Path, worker: int, capfd: pytest.CaptureFixture[str]
) -> None:
    _py_spy(tmp_path, 0)
    assert attach.main([str(tmp_path / "rank-0.pid"), "stacks"]) == 0
    assert capfd.readouterr().out == f"dump --pid {worker}\n"


@pytest.mark.parametrize(
    ("code", "why"), [(1, "py-spy may not look at it"), (None, "there is no py-spy beside /")]
)
def test_without_py_spys_help_the_worker_has_to_tell(
    tmp_path: Path, worker: int, capfd: pytest.CaptureFixture[str], code: int | None, why: str
) -> None:
    if code is not None:
        _py_spy(tmp_path, code)
    assert attach.main([str(tmp_path / "rank-0.pid"), "stacks"]) == 1
    error, hint = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: {why}")
    assert hint == f"hint: {tmp_path}/python -m pip install py-spy"
    assert Path(f"/proc/{worker}").exists()


@pytest.mark.parametrize("text", ["", "x", "999999999"])
def test_a_worker_that_is_gone(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.pid").write_text(text)
    with pytest.raises(HpcDdpError, match="rank-0 has no process on"):
        attach.worker_of(tmp_path / "rank-0.pid")


def test_a_command_takes_the_workers_place_but_for_its_rank(
    tmp_path: Path, worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, list[str], dict[str, str], str]] = []
    monkeypatch.setattr(
        os, "execvpe", lambda file, argv, env: calls.append((file, argv, env, os.getcwd()))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TERM", raising=False)
    assert attach.main([str(tmp_path / "rank-0.pid"), "run", "ls", "-l"]) == 0
    env = {"MINE": "a=b", "HPC_DDP_RUN": "/r", "TERM": "dumb"}
    assert calls == [("ls", ["ls", "-l"], env, str(tmp_path / "deep"))]


def test_a_signal_that_is_handled() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert attach._catches(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert attach._catches(os.getpid(), signal.SIGUSR2) is False
    finally:
        signal.signal(signal.SIGUSR2, before)
