"""The metrics of a run as curves, from its journal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from hpc_ddp.core.journal.events import FirstStep, JournalEvent, MetricsLine, TrainingBegun
from hpc_ddp.core.journal.fields import to_number
from hpc_ddp.core.journal.journal import by_start

LARGEST_DRAWN = 1e300  # larger numbers are drawn like infinity
_NO_METRICS = ("step", "total_steps", "epoch")


class Point(NamedTuple):
    """A measured number; `start` is the index of the start of the workers, over all attempts."""

    step: float
    number: float
    start: int

    @property
    def is_finite(self) -> bool:
        """Whether the number can be drawn: it is not NaN, infinite, or too large."""
        return abs(self.number) < LARGEST_DRAWN  # also False for NaN


class Column(NamedTuple):
    """Neighbouring points, drawn as one: their last step, and their least, mean and greatest
    number."""

    step: float
    low: float
    mean: float
    high: float


class Segment(NamedTuple):
    """Points to be drawn as one line. `is_finite`: all of them are finite (`Point.is_finite`), else
    none is. `is_redone`: a later start has done these steps again."""

    points: Sequence[Point]
    is_finite: bool
    is_redone: bool


class Start(NamedTuple):
    """A start of the workers; `step` is the last step before it. `is_restart`: it is not the first
    start of its attempt."""

    attempt: int
    step: float
    is_restart: bool


@dataclass
class Curve:
    """One metric of a run, in the order in which it was measured."""

    name: str
    points: list[Point] = field(default_factory=list)

    @property
    def finite(self) -> list[float]:
        """The numbers of at most `LARGEST_DRAWN`, by amount: none is NaN or infinite."""
        return [number for _, number, _ in self.points if abs(number) < LARGEST_DRAWN]

    def segments(self) -> Iterator[Segment]:
        """Yield the curve's points as segments, in order. A segment ends where a start of the
        workers begins, at the first step that a later start has done again, and where numbers
        become finite or cease to be."""
        starts = [list(group) for _, group in groupby(self.points, key=itemgetter(2))]
        first_step = math.inf  # of all later starts
        redone_from: list[float] = []  # of each start, the first step that was done again
        for points in reversed(starts):
            redone_from.insert(0, first_step)
            first_step = min(first_step, *map(itemgetter(0), points))
        for points, redone_step in zip(starts, redone_from, strict=True):
            yield from _segments_of_start(points, redone_step)


def _segments_of_start(points: Sequence[Point], redone_from: float) -> Iterator[Segment]:
    """Yield the points of one start, one or more, as segments: cut where they become finite or
    cease to be, and at the step `redone_from`, from which on a later start has done the steps
    again."""
    # The fast way for most of 100,000 points: Point.is_finite of all, without a loop in Python.
    is_finite = all(map(LARGEST_DRAWN.__gt__, map(abs, map(itemgetter(1), points))))
    if is_finite and max(map(itemgetter(0), points)) < redone_from:
        yield Segment(points, is_finite=True, is_redone=False)
        return

    def kind_of(point: Point) -> tuple[bool, bool]:
        """Return whether a point is finite, and whether its step was done again."""
        return point.is_finite, point.step >= redone_from

    for (is_finite, is_redone), group in groupby(points, key=kind_of):
        yield Segment(list(group), is_finite, is_redone)


def merge_points(points: Sequence[Point], width: float) -> list[Column]:
    """Return the points of a line merged into columns of a picture, in the points' order; []
    without points. Only neighbours in `points` share a column; `width` is a column's width in
    steps, above 0."""
    columns = []
    for _, group in groupby(points, key=lambda point: int(point.step / width)):
        steps, numbers, _ = zip(*group, strict=True)
        columns.append(Column(steps[-1], min(numbers), sum(numbers) / len(numbers), max(numbers)))
    return columns


def curves_of(events: Sequence[JournalEvent]) -> dict[str, Curve]:
    """Return a run's metrics as curves, by name, each with a point or more: the loss first, the
    speed last. Steps and epochs, and values that are no numbers, are left out. `events` are the
    run's journal."""
    curves: dict[str, Curve] = {}
    for index, start in enumerate(by_start(events)):
        for event in start:
            if not isinstance(event, MetricsLine):
                continue
            step = event.step
            for name, entry in event.values.items():
                number = entry if type(entry) is float else to_number(entry)
                if number is not None and name not in _NO_METRICS:
                    if name not in curves:
                        curves[name] = Curve(name)
                    curves[name].points.append(Point(step, number, index))
    order = {"loss": 0, "mfu": 2, "samples_per_s": 3}
    return dict(sorted(curves.items(), key=lambda pair: order.get(pair[0], 1)))


def starts_of(events: Sequence[JournalEvent]) -> list[Start]:
    """Return the starts of the workers that reached their training loop, in order, by the run's
    journal. The first such start of an attempt is no restart."""
    starts: list[Start] = []
    for start in by_start(events):
        in_loop = [e for e in start if isinstance(e, (TrainingBegun, FirstStep, MetricsLine))]
        if in_loop:
            first = in_loop[0]
            # TrainingBegun has the step before the loop; the other two are written after theirs.
            step = first.step if isinstance(first, TrainingBegun) else first.step - 1
            is_restart = bool(starts) and starts[-1].attempt == first.attempt
            starts.append(Start(first.attempt, step, is_restart))
    return starts
