"""A rank that the others wait for."""

from __future__ import annotations

from typing import Any

from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.core.journal.stragglers import slow_rank
from tests.raw_events import typed


def _event(event: str, time: float = 1.0, attempt: int = 0, **fields: Any) -> JournalEvent:
    return typed(event, time, attempt, **fields)


def test_a_rank_is_slow_by_its_own_start() -> None:
    slow: dict[str, Any] = {
        "busy_s": [0.1, 0.4, 0.1],
        "data_s": [0.0, 0.0, 0.0],
        "step_s": 0.4,
        "slowest": 1,
    }
    events = [_event("ranks", **slow, node="n2") for _ in range(3)]
    result = slow_rank(events)
    assert result is not None
    assert (result.rank, result.node, result.own_s, result.others_s, result.data) == (
        *(1, "n2", 0.4, 0.1),
        False,
    )
    for begin in ("started", "worker"):
        assert slow_rank([*events[:2], _event(begin), *events[2:]]) is None
        assert slow_rank([*events, _event(begin)]) is None
        assert slow_rank([_event(begin), *events]) == result
    # A quarter more than the others, and a tenth of a step that all wait for.
    for own, step_s, named in ((0.125, 0.2, True), (0.12, 0.1, False), (0.125, 0.3, False)):
        values = {**slow, "busy_s": [0.1, own, 0.1], "step_s": step_s}
        assert (slow_rank([_event("ranks", **values)] * 3) is not None) is named, own
