"""Lines between a node and the driver."""

from __future__ import annotations

import pytest

from hpc_ddp.node.preflight.messages import MARK, report


def test_messages_are_short_and_whole(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_DDP_NODE", "n1")
    report(fault="x", why="é" * 5000)
    line = capfd.readouterr().out
    assert line.startswith(MARK)
    assert len(line.encode()) < 1024
