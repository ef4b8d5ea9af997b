"""Processes are identified by host, number and start time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from hpc_ddp.core import process


def test_a_process_is_identified_by_its_start_time() -> None:
    identity = process.identity()
    assert (identity["host"], identity["pid"]) == (socket.gethostname(), os.getpid())
    assert process.is_live(identity)
    for change in ({"host": "x"}, {"pid": "7"}, {"began": "1"}, {"pid": 1 << 30}, {"pid": None}):
        assert not process.is_live({**identity, **change}), change
    began = process.began_at()
    assert began is not None
    assert time.time() - 36000 < began < time.time()


def test_a_zombie_is_not_live() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process._began(child.pid) is None
    assert process._exists(os.getpid()) is None  # where there is /proc, that has the answer
    assert signal.SIGRTMIN < process.SHOW_STACKS < signal.SIGRTMAX


def test_a_process_is_identified_by_its_number_without_proc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["true"]) as child:
        pass

    def fail(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(Path, "read_text", fail)
    identity = process.identity()
    assert process.is_live(identity)
    assert not process.is_live({**identity, "pid": child.pid})
    assert process.began_at() is None
