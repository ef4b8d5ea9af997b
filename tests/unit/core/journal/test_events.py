"""Lines of the journal become records, also those of other writers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.core.journal.events import EVENTS, step_of
from hpc_ddp.core.journal.journal import read_briefly, read_events
from hpc_ddp.core.journal.parsing import parse_event


@pytest.mark.parametrize(
    ("event", "sound"),
    [
        ({}, True),
        ({"nodes": [], "pid": None, "new": 1}, True),
        ({"time": "1"}, False),
        ({"time": float("inf")}, False),
        ({"time": 10**400}, False),
        ({"attempt": 1.5}, False),
        ({"event": 3}, False),
        ({"event": []}, False),
        ({"event": "a later version's"}, False),
        ({"nodes": "n1"}, False),
        ({"nodes": [1]}, False),
        ({"shell": 3}, False),
        ({"event": "metrics", "step": 3, "loss": float("nan"), "text": "x"}, True),
        ({"event": "metrics", "step": "3"}, False),
        ({"event": "checkpoint"}, True),
        ({"event": "checkpoint", "write_s": float("nan")}, False),
        ({"event": "verdict", "cause": "failed", "action": "requeue"}, True),
        ({"event": "verdict", "cause": "failed", "action": "requeue", "why": 5}, False),
        ({"event": "verdict", "cause": "failed"}, False),
        ({"event": "verdict", "cause": "a later version's", "action": "requeue"}, False),
        ({"event": "verdict", "cause": ["failed"], "action": "requeue"}, False),
    ],
)
def test_a_line_of_another_writer_is_read_or_left_out(
    tmp_path: Path, event: dict[str, Any], sound: bool
) -> None:
    line = {"time": 1.0, "event": "started", "attempt": 0, **event}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
    assert bool(read_events(tmp_path)) is sound
    assert read_briefly(tmp_path) == read_events(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)

NAMES = sorted({field.name for kind in EVENTS for field in kind.own_fields()})


@given(
    st.sampled_from([kind.event for kind in EVENTS]),
    st.dictionaries(st.sampled_from(["time", "attempt", "event", *NAMES]), JSON),
)
def test_no_line_is_too_damaged_to_be_read(event: str, fields: dict[str, Any]) -> None:
    record = parse_event(json.dumps({"time": 1.0, "attempt": 0, "event": event, **fields}))
    if record is not None:
        assert parse_event(json.dumps(record.to_line())) is not None
        step_of(record)


def test_a_metrics_line_without_a_step_has_step_0() -> None:
    for fields in ({}, {"step": None, "total_steps": None}):
        line = json.dumps({"time": 1.0, "event": "metrics", "attempt": 0, **fields})
        assert step_of(parse_event(line)) == 0
