"""Reports of nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpc_ddp.node.preflight.blame import NodeReport, Reports

NODES = ("a", "b", "c", "d")


def reports_of(count: int = 3, **speeds: float) -> Reports:
    """Nodes without a fault, of 1000 MB/s but for `speeds`."""
    names = NODES[:count]
    return {name: NodeReport(values={"exchange_mb_s": speeds.get(name, 1000.0)}) for name in names}


Lines = Callable[[], list[dict[str, Any]]]
