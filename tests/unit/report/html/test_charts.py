"""Charts have axes for any numbers, lines, bands and dots."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.report.html.charts import Chart, Scale, _marks, make_charts
from hpc_ddp.report.html.curves import Curve, Point, Start


def _make_chart(*numbers: float) -> Chart:
    points = [Point(step, number, 0) for step, number in enumerate(numbers, start=1)]
    (chart,) = make_charts([Curve("loss", points)], [], {})
    return chart


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.sampled_from([False, True]))
def test_axes_hold_any_range(a: float, b: float, is_log: bool) -> None:
    if is_log:  # only from a hundredfold on
        a = max(abs(a), 1e-249)
        b = 1000 * a
    scale = Scale(min(a, b), max(a, b), is_log)
    labels = scale.ticks(4)
    assert len(labels) <= 21
    assert all(0 <= label.at <= 100 for label in labels)
    assert 0 <= scale(a) <= 1


def test_a_single_point_is_a_dot() -> None:
    chart = _make_chart(7.0)
    assert chart.paths[0].d.endswith("h0")
    assert chart.summary == "loss, 7 at step 1"


def test_a_wide_range_is_logarithmic() -> None:
    chart = _make_chart(100.0, 10.0, 1.0, 0.1)
    assert "logarithmic" in chart.notes
    assert [label.text for label in chart.y_ticks] == ["0.1", "1", "10", "100"]
    assert "logarithmic" not in _make_chart(2.0, 1.0, 0.5).notes
    assert "logarithmic" not in _make_chart(100.0, 1.0, -1.0).notes


def test_a_noisy_curve_has_a_band() -> None:
    chance = random.Random(0)
    chart = _make_chart(*(chance.random() for _ in range(2000)))
    assert [path.kind for path in chart.paths] == ["band", "line"]
    assert len(chart.points) <= 301
    assert [path.kind for path in _make_chart(*map(float, range(200))).paths] == ["line"]


def test_a_mark_left_of_the_last_one_has_its_number() -> None:
    """An attempt that began at an older step: after damaged checkpoints, or with --fresh."""
    starts = [Start(attempt, step, False) for attempt, step in enumerate([0, 60, 30, 62])]
    assert [label.text for label in _marks(starts, {}, Scale(0, 100))] == ["0", "1", "2", ""]
