"""A run's metrics as curves, from its journal; and fewer points that look the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from hpc_ddp.run.journal import Event

HUGE = 1e300  # what is beyond it is drawn like an infinite value
_NO_CURVES = ("time", "event", "attempt", "step", "total_steps", "epoch")


@dataclass
class Curve:
    """One metric of a run, point by point, in the order in which it was measured.

    Attributes
    ----------
    steps, times, values
        of each point; times in seconds since the run began, values may be NaN or infinite
    attempts, starts
        of each point: its attempt, and which start of the workers it is from (counted over all
        attempts: torchrun may start them again within one)
    redone
        of each point: a later start has done this step again
    """

    name: str
    steps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    redone: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property  # once all points are there
    def finite(self) -> list[float]:
        return [value for value in self.values if is_finite(value)]

    @property
    def last(self) -> float:
        return self.values[-1]

    def kept(self) -> list[int]:
        """Return the points that count: of steps that were done again, the last time."""
        return [i for i, redone in enumerate(self.redone) if not redone]


@dataclass(frozen=True)
class Start:
    """A start of the workers: its attempt, the step that it begins at (None: it never trained),
    when it did so in seconds since the run began, and whether it is a restart in an attempt."""

    attempt: int
    step: float | None
    time: float
    again: bool


def is_finite(value: float) -> bool:
    return abs(value) < HUGE  # also False for NaN


def starts_of(events: Sequence[Event], begin: float) -> list[Start]:
    """Return the starts of the workers that came to train, in order; times from `begin` on."""
    found: list[Start] = []
    for cut in _cuts(events):
        entered = [e for e in cut if e["event"] in ("training", "first_step", "metrics")]
        if entered:
            step = number(entered[0].get("step")) or 0.0
            step -= entered[0]["event"] != "training"  # those come when a step is done
            again = bool(found) and found[-1].attempt == cut[0]["attempt"]
            found.append(Start(cut[0]["attempt"], step, entered[0]["time"] - begin, again))
    return found


def curves_of(events: Sequence[Event], begin: float) -> dict[str, Curve]:
    """Return a run's metrics by name, as its script gave them; the loss first, speed last.

    What is no number is left out; times count from `begin`, in unix seconds.
    """
    found: dict[str, Curve] = {}
    cuts = [cut for cut in _cuts(events) if any(e["event"] == "metrics" for e in cut)]
    for index, cut in enumerate(cuts):
        for event in cut:
            step = number(event.get("step"))
            if event["event"] != "metrics" or step is None or not math.isfinite(step):
                continue
            for name, raw in event.items():
                value = number(raw)
                if name in _NO_CURVES or value is None:
                    continue
                curve = found.setdefault(name, Curve(name))
                curve.steps.append(step)
                curve.times.append(event["time"] - begin)
                curve.values.append(value)
                curve.attempts.append(event["attempt"])
                curve.starts.append(index)
    for curve in found.values():
        least = math.inf  # the first step of all later starts
        for i in reversed(range(len(curve))):
            later_begins = i + 1 < len(curve) and curve.starts[i] != curve.starts[i + 1]
            least = min(least, curve.steps[i + 1]) if later_begins else least
            curve.redone.append(curve.steps[i] >= least)
        curve.redone.reverse()
    order = {"loss": 0, "mfu": 2, "samples_per_s": 3}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], 1)))


def _cuts(events: Sequence[Event]) -> list[list[Event]]:
    """Cut the journal at each start of the workers: by attempt, and at restarts within one."""
    cuts: list[list[Event]] = []
    begun = False
    for event in events:
        if not cuts or event["attempt"] != cuts[-1][0]["attempt"]:
            cuts.append([])
            begun = False
        elif event["event"] == "worker" and begun:
            cuts.append([])
        begun = begun or event["event"] == "worker"
        cuts[-1].append(event)
    return cuts


def number(value: Any) -> float | None:
    """Return a number of the journal as a float, None for anything else."""
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def thinned(curve: Curve, columns: int) -> list[int]:
    """Return the points that show in a picture of so many columns: of each column the least and
    the greatest value, of each start the first and the last point, and values that are none.

    Columns are cut both by step and by time, so that the points serve for both.
    """
    if len(curve) <= 2 * columns:
        return list(range(len(curve)))
    keep: set[int] = set()
    for places in (curve.steps, curve.times):
        low, high = min(places), max(places)
        width = (high - low) / columns or 1.0
        cells: dict[tuple[int, int, bool], list[int]] = {}
        for i, place in enumerate(places):
            sound = is_finite(curve.values[i])
            cells.setdefault((curve.starts[i], int((place - low) / width), sound), []).append(i)
        for (_, _, sound), cell in cells.items():
            if sound:
                keep |= {min(cell, key=curve.values.__getitem__)}
                keep |= {max(cell, key=curve.values.__getitem__)}
            else:
                keep.add(cell[0])
    edges = [i for i in range(1, len(curve)) if curve.starts[i] != curve.starts[i - 1]]
    keep |= {0, len(curve) - 1, *edges, *(i - 1 for i in edges)}
    return sorted(keep)


def is_noisy(values: Sequence[float]) -> bool:
    """Tell whether a line through the values would be a scribble: long, and up and down."""
    if len(values) < 60:
        return False
    way = sum(abs(b - a) for a, b in pairwise(values))
    return way > 6 * (max(values) - min(values))


def smoothed(values: Sequence[float], of: int) -> list[float]:
    """Return a moving mean of the values, over some 2 % of the curve of so many points that they
    are from; what is nearer counts more."""
    half = max(3, of // 200)
    for _ in range(2):  # twice: a single mean would draw a step for each spike
        sums = [0.0, *accumulate(values)]
        ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
        values = [(sums[b] - sums[a]) / (b - a) for a, b in ends]
    return list(values)
