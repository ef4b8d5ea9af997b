"""Lines between a node and the driver."""

from __future__ import annotations

import pytest

from hpc_ddp.node.preflight.messages import MARK, report


@pytest.mark.parametrize("text", ["é", '"', "\\", "\x00", "\udc80"])
def test_messages_are_short_and_whole(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HPC_DDP_NODE", "n1")
    report(fault="x", why=text * 5000)
    line = capfd.readouterr().out
    assert line.startswith(MARK)
    assert len(line.encode()) < 1024
