from __future__ import annotations

from hpc_ddp.node.continuation import KEPT_OFF_S, _bad_nodes


def test_a_blamed_node_is_kept_off_for_a_day() -> None:
    verdict = {"event": "verdict", "attempt": 0, "time": 1000.0, "bad_nodes": ["n2", "n1"]}
    older = {**verdict, "time": 0.0, "bad_nodes": ["n3"]}
    other = {"event": "verdict", "attempt": 1, "time": 1001.0}
    events = [older, verdict, other]
    assert _bad_nodes(events, 1002.0) == ["n1", "n2", "n3"]
    assert _bad_nodes(events, 500.0 + KEPT_OFF_S) == ["n1", "n2"]
    assert _bad_nodes(events, 1000.0 + KEPT_OFF_S) == []
