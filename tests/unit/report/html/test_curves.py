"""Curves are cut at restarts, and thinned without losing a spike."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.report.html.curves import Curve, Point, curves_of, merge_points, starts_of
from tests.raw_events import typed


def _event(name: str, attempt: int = 0, **fields: Any) -> JournalEvent:
    return typed(name, 0.0, attempt, **fields)


def _steps(first: int, last: int, attempt: int = 0) -> list[JournalEvent]:
    return [
        _event("metrics", attempt, step=step, loss=float(step)) for step in range(first, last + 1)
    ]


def test_a_curve_is_cut_where_the_workers_start_again() -> None:
    events = [_event("training", step=0), *_steps(1, 40)]
    events += [_event("worker", 1), _event("training", 1, step=20), *_steps(21, 30, 1)]
    events += [_event("worker", 1), _event("training", 1, step=25), *_steps(26, 60, 1)]
    segments = list(curves_of(events)["loss"].segments())
    steps = [(s.points[0].step, s.points[-1].step, s.is_redone) for s in segments]
    assert steps == [
        (1, 20, False),
        (21, 40, True),
        (21, 25, False),
        (26, 30, True),
        (26, 60, False),
    ]
    starts = [(start.attempt, start.step, start.is_restart) for start in starts_of(events)]
    assert starts == [(0, 0, False), (1, 20, False), (1, 25, True)]


def test_infinite_numbers_are_segments_of_their_own() -> None:
    curve = Curve("x", [Point(i, math.nan if i == 3 else 1.0, 0) for i in range(6)])
    assert [(len(s.points), s.is_finite) for s in curve.segments()] == [
        (3, True),
        (1, False),
        (2, True),
    ]


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), st.integers(1, 30))
def test_columns_keep_the_least_and_the_greatest(numbers: list[float], count: int) -> None:
    points = [Point(step, number, 0) for step, number in enumerate(numbers)]
    joined = merge_points(points, len(points) / count)
    assert len(joined) <= count + 1
    assert min(column.low for column in joined) == min(numbers)
    assert max(column.high for column in joined) == max(numbers)
    assert all(column.low <= column.high for column in joined)
    assert joined[-1].step == len(points) - 1
