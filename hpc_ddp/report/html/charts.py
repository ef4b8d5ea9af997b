"""Charts as SVG paths and labels, for the template to place.

A plot is an SVG that is stretched to the width of the page, with lines that keep their width; its
labels are text beside it, placed in percent. So one drawing fits all screens, without a script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpc_ddp.core.console.units import measured
from hpc_ddp.report.html.curves import Column, Curve, Start, merge_points

WIDTH, HEIGHT = 1000, 400  # of a plot, in units of its paths
MOST_COLUMNS = 4000  # of all charts of a page: a column takes some 50 bytes
LOG_RATIO = 100.0  # an axis is logarithmic if its greatest number is more times the least one
_LEAST = 1e-250  # the least number, and the least difference, that an axis can show
_LABEL_WIDTH = 4.5  # percent of a plot's width


class Label(NamedTuple):
    """A text beside an axis or above a mark: `at` is its place in percent of the plot; `title` is
    shown under the pointer."""

    at: float
    text: str
    title: str = ""


class SvgPath(NamedTuple):
    """An SVG path with the commands `d`; `kind` is ``line``, ``band`` (from the least to the
    greatest numbers) or ``redone`` (a line of steps that a later start has done again)."""

    d: str
    kind: str


@dataclass(frozen=True)
class Chart:
    """One metric over the steps.

    Attributes
    ----------
    last, summary, notes
        the last number, a sentence with it, and remarks on the drawing, as text
    steps
        the first and the last step of the axis
    x_ticks, y_ticks
        the labels of the axes, of steps from the left and of numbers from the top
    marks
        the starts of the workers after the first one
    bad
        the places of numbers that are NaN or infinite, in percent from the left
    points
        (step, number as text) for the page's script, which shows numbers under the pointer
    """

    name: str
    last: str
    summary: str
    notes: Sequence[str]
    steps: tuple[float, float]
    x_ticks: Sequence[Label]
    y_ticks: Sequence[Label]
    paths: Sequence[SvgPath]
    marks: Sequence[Label]
    bad: Sequence[float]
    points: Sequence[tuple[float, str]]


class Scale:
    """Maps numbers between `low` and `high` to places from 0 to 1: linearly, or with `is_log` by
    their logarithms, for numbers above 0 (ValueError for others). If `low` and `high` are equal,
    the axis has some room on either side of them. The attributes `low` and `high` are the ends of
    the axis, with `is_log` their logarithms."""

    def __init__(self, low: float, high: float, is_log: bool = False) -> None:
        if is_log:
            low, high = math.log10(low), math.log10(high)
        if high - low < max(1e-12 * max(abs(low), abs(high)), _LEAST):
            room = 0.5 * abs(low) if abs(low) > _LEAST else 1.0
            low, high = low - room, high + room
        self.low, self.high, self.is_log = low, high, is_log

    def __call__(self, number: float) -> float:
        """Return the place of a number, from 0 to 1; a number beyond an end is at this end."""
        number = math.log10(number) if self.is_log else number
        return min(1.0, max(0.0, (number - self.low) / (self.high - self.low)))

    def ticks(self, count: int, least: float = 0.0) -> list[Label]:
        """Return about `count` labels, 21 at most, with `at` in percent from the low end. On a
        linear axis they are round numbers, at least `least` apart; on a logarithmic axis they are
        powers of ten. [] where no such number lies on the axis."""
        unit = 1.0 if self.is_log else least
        distance = max(_round_up((self.high - self.low) / count), unit)
        first = math.ceil(self.low / distance - 1e-9)  # with 1e-9 for rounding
        last = math.floor(self.high / distance + 1e-9)
        labels = []
        for multiple in range(first, min(last, first + 20) + 1):
            place = multiple * distance
            number = 10.0**place if self.is_log else place
            labels.append(Label(round(100 * self(number), 2), measured(number)))
        return labels


def _round_up(number: float) -> float:
    """Return the smallest number of the form 1, 2 or 5 times a power of ten that is at least 0.999
    times `number`. Raise ValueError for a number that is not above 0."""
    power = 10.0 ** math.floor(math.log10(number))
    return next(part * power for part in (1, 2, 5, 10) if part * power >= number * 0.999)


def make_charts(
    curves: Sequence[Curve], starts: Sequence[Start], ends: Mapping[int, str]
) -> list[Chart]:
    """Return a chart of each curve, in their order; each curve has a point or more. `starts` are
    the starts of the workers, of which all but the first are marked; `ends` has a phrase on the end
    of each attempt, by number."""
    count = max(20, min(300, MOST_COLUMNS // max(len(curves), 1)))
    return [_make_chart(curve, starts[1:], ends, count) for curve in curves]


def _make_chart(
    curve: Curve, starts: Sequence[Start], ends: Mapping[int, str], count: int
) -> Chart:
    """Return the chart of one curve, with about `count` columns in its width. `starts` are those to
    mark; `ends` is as in `make_charts`."""
    steps = [point.step for point in curve.points]
    # The axis begins at zero where that is near.
    across = Scale(0.0 if min(steps) < 0.2 * max(steps) else min(steps), max(steps))
    up = _number_scale(curve)
    width = (across.high - across.low) / count
    paths: list[SvgPath] = []
    points: list[tuple[float, str]] = []
    bad: list[float] = []
    for segment in curve.segments():
        if segment.is_finite:
            line = merge_points(segment.points, width)
            paths += _paths(line, across, up, segment.is_redone)
            points += [(column.step, measured(column.mean)) for column in line]
        else:
            bad += [round(100 * across(point.step), 1) for point in segment.points]
            points += [(point.step, measured(point.number)) for point in segment.points[:count]]
    notes = ["logarithmic"] if up.is_log else []
    if bad:
        notes.append(f"×: {len(bad):,} NaN or infinite")
    last = measured(curve.points[-1].number)
    return Chart(
        name=curve.name,
        last=last,
        summary=f"{curve.name}, {last} at step {steps[-1]:.0f}",
        notes=notes,
        steps=(across.low, across.high),
        x_ticks=across.ticks(6, least=1.0),
        y_ticks=[label._replace(at=100 - label.at) for label in up.ticks(4)],
        paths=paths,
        marks=_marks(starts, ends, across),
        bad=sorted(set(bad)),
        points=points,
    )


def _number_scale(curve: Curve) -> Scale:
    """Return the scale of a curve's numbers. It is logarithmic where they are above 0 and far apart
    (`LOG_RATIO`); else it begins at zero where that is near, or has some room on either side.
    Without a finite number it goes from about 0 to 1. The scale of a speed is never logarithmic,
    and begins at zero."""
    finite = curve.finite
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    is_speed = curve.name == "samples_per_s"
    if low > _LEAST and high / LOG_RATIO > low and not is_speed:
        return Scale(low, high, is_log=True)
    room = 0.06 * (high - low)
    if low >= 0 and (is_speed or low < 0.35 * high):
        return Scale(0.0, high + room)
    return Scale(low - room, high + room)


def _paths(line: Sequence[Column], across: Scale, up: Scale, is_redone: bool) -> list[SvgPath]:
    """Return the paths of a line: the band from the least to the greatest numbers, which is drawn
    first, and the line of the means.

    `line` has a column or more; `across` scales steps, `up` numbers. There is no band where each
    column has a single number, and for steps that were done again later (`is_redone`).
    """

    def coordinates(step: float, number: float) -> str:
        """Return the place of a step and a number in the plot, ``X Y`` from the upper left."""
        return f"{WIDTH * across(step):.0f} {HEIGHT * (1 - up(number)):.0f}"

    d = "M" + "L".join(coordinates(column.step, column.mean) for column in line)
    if len(line) == 1:
        d += "h0"  # a line without length, by which a single point shows as a dot
    paths = [SvgPath(d, "redone" if is_redone else "line")]
    if any(column.high > column.low for column in line) and not is_redone:
        edge = [coordinates(column.step, column.high) for column in line]
        edge += [coordinates(column.step, column.low) for column in reversed(line)]
        paths.insert(0, SvgPath(f"M{'L'.join(edge)}z", "band"))
    return paths


def _marks(starts: Sequence[Start], ends: Mapping[int, str], across: Scale) -> list[Label]:
    """Return a mark for each start. Its text is the attempt's number, or ``↻`` for a restart within
    an attempt; '' where the text would overlap the text of an earlier mark. `ends` is as in
    `make_charts`; `across` scales steps."""
    marks: list[Label] = []
    texts_at: list[float] = []  # the places of the marks with a text
    for start in starts:
        at = round(100 * across(start.step), 2)
        title = f"attempt {start.attempt}, from step {start.step:.0f}"
        if start.is_restart:
            title = f"restart in {title}"
        elif ends.get(start.attempt - 1):
            title += f"; before: {ends[start.attempt - 1]}"
        text = "↻" if start.is_restart else str(start.attempt)
        if any(abs(at - shown_at) < _LABEL_WIDTH for shown_at in texts_at):
            text = ""
        else:
            texts_at.append(at)
        marks.append(Label(at, text, title))
    return marks
