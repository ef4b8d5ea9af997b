"""Nodes that a verdict blamed are kept off for a day."""

from __future__ import annotations

from pathlib import Path

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue.excluded_nodes import _bad_nodes
from tests.raw_events import typed


def test_a_blamed_node_is_kept_off_for_a_day(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    verdict = typed("verdict", 1000.0, bad_nodes=["n2", "n1"])
    older = typed("verdict", 1.0, bad_nodes=["n3"])
    events = [older, verdict, typed("verdict", 1001.0, 1)]
    assert _bad_nodes(run, events, since=0.0) == ["n1", "n2", "n3"]
    assert _bad_nodes(run, events, since=500.0) == ["n1", "n2"]
    assert _bad_nodes(run, events, since=1000.0) == []
