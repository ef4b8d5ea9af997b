from __future__ import annotations

import os

import pytest

from hpc_ddp.core import process
from hpc_ddp.node import child_process, supervisor
from hpc_ddp.node.outcome import first_failure
from hpc_ddp.node.outcome import oom as oom_module
from hpc_ddp.node.watch import log_offsets, look_times
from unit.fakes import Clock, stop_clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(oom_module, "count_kills", lambda: 0)
    return stop_clock(
        monkeypatch, supervisor, child_process, look_times, log_offsets, first_failure
    )


@pytest.fixture(autouse=True)
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of nodes that are none here are not looked up."""
    monkeypatch.setattr(supervisor, "check_resolves", lambda host: None)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The signals that were sent, as process id and number."""
    result: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: result.append((pid, number)))
    monkeypatch.setattr(os, "getpgid", lambda pid: 0)
    monkeypatch.setattr(process, "_began", lambda pid: "then")
    return result
