from __future__ import annotations

import json
from typing import Any

import pytest

from hpc_ddp.node.preflight.messages import MARK
from unit.node.preflight.fakes import Lines


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Return the messages since the last call, without the node's name."""
    monkeypatch.setenv("HPC_DDP_NODE", "n1")

    def read() -> list[dict[str, Any]]:
        texts = [line.removeprefix(MARK) for line in capfd.readouterr().out.splitlines()]
        return [{k: v for k, v in json.loads(text).items() if k != "node"} for text in texts]

    return read
