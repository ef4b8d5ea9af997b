"""Charts as SVG paths and labels, for the template to place.

A plot is an SVG that is stretched to whatever room the page has, with lines that keep their
width; its labels are text beside it, placed in percent. So one drawing serves all screens, and
needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hpc_ddp.report.curves import Curve, Start, is_finite, is_noisy, smoothed, thinned

WIDTH, HEIGHT = 2400, 1000  # of a plot's own units
_POINTS = 8000  # of all curves of a page: some 60 bytes each, with those that are drawn
_SPAN = 20.0  # from what ratio of the greatest to the least value on a log scale helps
_CLOSE = 4.5  # percent: as wide as a label is on a phone
_LEAST = 1e-250  # that a log scale can have


@dataclass(frozen=True)
class Tick:
    """A label beside an axis. `at` is in percent; every `minor` one goes where room is short."""

    at: float
    text: str
    minor: bool = False


@dataclass(frozen=True)
class Line:
    """A path in a plot's units; `kind` is `line`, `faint` or `redone`, `hue` a colour's number."""

    d: str
    kind: str
    hue: int


@dataclass(frozen=True)
class Label:
    """A short text above a mark, or at the end of a line: `at` in percent from the left, `top`
    from the top; `tip` says more. Without a text the mark is one of several close ones."""

    at: float
    text: str
    tip: str = ""
    top: float = 0.0
    hue: int = 0


@dataclass(frozen=True)
class Plot:
    """What a template needs to draw one chart in one way.

    `x` is what the axis shows, ``step`` or ``time``; `log` whether the values are on a log scale;
    `box` is (first x, last x, lowest y, highest y); `bad` are the places of values that are NaN or
    infinite.
    """

    x: str
    log: bool
    box: tuple[float, float, float, float]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    lines: Sequence[Line]
    marks: Sequence[Label]
    ends: Sequence[Label]
    bad: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """One metric: its plots (by step and by time, linear and logarithmic), and its points.

    `points` is for the script that shows values under the pointer: of each curve its label, and
    by point step, time, value (a string where it is no number) and attempt.
    """

    name: str
    summary: str
    last: str
    notes: Sequence[str]
    plots: Sequence[Plot]
    points: Sequence[dict[str, object]]


def charts(
    names: Iterable[str],
    runs: Sequence[tuple[str, dict[str, Curve]]],
    starts: Sequence[Start] = (),
    causes: dict[int, str] | None = None,
) -> list[Chart]:
    """Return a chart for each metric, with a curve of each run that has it.

    Parameters
    ----------
    runs
        (label, curves) of each; a label is shown at the end of a line where there are several
    starts, causes
        of a single run: where its workers were started again, and why by attempt
    """
    names = list(names)
    count = sum(len(found[name].finite) > 0 for name in names for _, found in runs if name in found)
    columns = max(20, min(400, _POINTS // (4 * max(count, 1))))
    marks = starts[1:]
    return [_chart(name, runs, marks, causes or {}, columns) for name in names]


@dataclass(frozen=True)
class _Drawn:
    """A curve on its way to paper: the `points` that show, and where it is noisy its moving mean
    at some of them, by whether that is on a log scale."""

    hue: int
    label: str
    curve: Curve
    points: Sequence[int]
    means: Mapping[bool, Mapping[int, float]]

    def places(self, x: str) -> Sequence[float]:
        return self.curve.steps if x == "step" else self.curve.times


def _chart(
    name: str,
    runs: Sequence[tuple[str, dict[str, Curve]]],
    starts: Sequence[Start],
    causes: dict[int, str],
    columns: int,
) -> Chart:
    curves = [(i, label, found[name]) for i, (label, found) in enumerate(runs) if name in found]
    sound = [value for *_, curve in curves for value in curve.finite]
    suits = bool(sound) and _LEAST < min(sound) < max(sound) / _SPAN and name != "samples_per_s"
    logs = [False, True] if suits else [False]
    noisy = any(is_noisy(curve.finite) for *_, curve in curves)
    drawn = [
        _Drawn(i, label, curve, thinned(curve, columns), _means(curve, logs) if noisy else {})
        for i, label, curve in curves
    ]
    notes = []
    bad = sum(len(each.curve) - len(each.curve.finite) for each in drawn)
    if bad:
        values = "value was" if bad == 1 else "values were"
        notes.append(f"{bad:,} {values} NaN or infinite: marked × at the upper edge")
    if any(each.means for each in drawn):
        notes.append("strong line: moving mean; faint line: as measured")
    if any(any(each.curve.redone) for each in drawn):
        notes.append("dotted: steps that were done again")
    plots = [
        _plot(
            drawn, _values(sound, log, name == "samples_per_s"), x, log, _marks(starts, causes, x)
        )
        for x in ("step", "time")
        for log in logs
    ]
    last = short(drawn[0].curve.last) if len(drawn) == 1 else ""
    points = [_points(each, name) for each in drawn]
    return Chart(name, _summary(name, [each.curve for each in drawn]), last, notes, plots, points)


def _means(curve: Curve, logs: Sequence[bool]) -> dict[bool, dict[int, float]]:
    """Return the moving mean of the points that count, at some 300 of them: of each start of the
    workers by itself, and on a log scale the mean of what is seen there."""
    points = [i for i in curve.kept() if is_finite(curve.values[i])]
    every = max(1, len(points) // 300)
    found: dict[bool, dict[int, float]] = {log: {} for log in logs}
    for _, group in groupby(points, key=curve.starts.__getitem__):
        here = list(group)
        values = [curve.values[i] for i in here]
        for log in logs:
            logged = [math.log(value) for value in values] if log else values
            means = smoothed(logged, len(points))
            for j in {*range(0, len(here), every), len(here) - 1}:
                found[log][here[j]] = math.exp(means[j]) if log else means[j]
    return {log: dict(sorted(means.items())) for log, means in found.items() if means}


def _points(drawn: _Drawn, name: str) -> dict[str, object]:
    """Return what the page's script shows under the pointer."""
    curve = drawn.curve
    return {
        "label": drawn.label or name,
        "hue": drawn.hue,
        "step": [int(curve.steps[i]) for i in drawn.points],
        "time": [round(curve.times[i], 1) for i in drawn.points],
        "value": [_json(curve.values[i]) for i in drawn.points],
        "attempt": [curve.attempts[i] for i in drawn.points],
    }


def _summary(name: str, curves: Sequence[Curve]) -> str:
    """Return a chart in words, for those who can't see it."""
    sound = [value for curve in curves for value in curve.finite]
    if not sound:
        return f"{name}: no value was a number"
    text = f"{name}, from {short(min(sound))} to {short(max(sound))}"
    if len(curves) == 1:
        text += f", at the end {short(curves[0].last)}, at step {int(curves[0].steps[-1])}"
    return text


def _plot(
    drawn: Sequence[_Drawn], up: Scale, x: str, log: bool, marks: Sequence[tuple[float, Label]]
) -> Plot:
    least = min(min(each.places(x)) for each in drawn)
    most = max(max(each.places(x)) for each in drawn)
    across = Scale(0.0 if x == "time" or least < 0.2 * most else least, most)
    lines: list[Line] = []
    ends: list[Label] = []
    bad: set[float] = set()
    for each in drawn:
        curve, at = each.curve, each.places(x)
        kind = "faint" if each.means else "line"
        for redone, look in ((True, "redone"), (False, kind)):
            d = _path(curve, each.points, at, curve.values, across, up, redone)
            lines += [Line(d, look, each.hue)] if d else []
        if mean := each.means.get(log):
            lines.append(Line(_path(curve, list(mean), at, mean, across, up), "line", each.hue))
        sound = [i for i in each.points if is_finite(curve.values[i])]
        bad |= {round(100 * across(at[i]), 2) for i in set(each.points).difference(sound)}
        if len(drawn) > 1 and sound:
            end = 100 * (1 - up(curve.values[sound[-1]]))
            where = 100 * across(at[sound[-1]])
            ends.append(Label(round(where, 2), each.label, top=round(end, 2), hue=each.hue))
    return Plot(
        x=x,
        log=log,
        box=(across.low, across.high, up.low, up.high),
        x_ticks=clock_ticks(across) if x == "time" else step_ticks(across),
        y_ticks=[Tick(100 - tick.at, tick.text, tick.minor) for tick in value_ticks(up)],
        lines=lines,
        marks=_placed(marks, across),
        ends=_spread(ends),
        bad=sorted(bad),
    )


def _path(
    curve: Curve,
    points: Sequence[int],
    at: Sequence[float],
    values: Sequence[float] | Mapping[int, float],
    across: Scale,
    up: Scale,
    redone: bool = False,
) -> str:
    """Return the points that were redone, or those that were not, as a path: broken where the
    workers began anew, and where a value is no number."""
    found: list[str] = []
    before: tuple[int, int, int] | None = None  # start, x, y
    for i in points:
        if curve.redone[i] != redone or not is_finite(values[i]):
            before = None
            continue
        x, y = round(WIDTH * across(at[i])), round(HEIGHT * (1 - up(values[i])))
        if before is None or before[0] != curve.starts[i]:
            found.append(f"M{x} {y}h0")  # a point alone shows as a dot
        else:
            found.append(f"l{x - before[1]} {y - before[2]}")
        before = curve.starts[i], x, y
    return "".join(found)


def _marks(starts: Sequence[Start], causes: dict[int, str], x: str) -> list[tuple[float, Label]]:
    """Return where an attempt, or a restart within one, began, in units of `x`, and its mark."""
    found = []
    for start in starts:
        what = f"restart in attempt {start.attempt}" if start.again else f"attempt {start.attempt}"
        why = "" if start.again else causes.get(start.attempt - 1, "")
        tip = f"{what}, from step {start.step or 0:.0f}" + (f"; before: {why}" if why else "")
        text = "↻" if start.again else str(start.attempt)
        found.append(((start.step or 0.0) if x == "step" else start.time, Label(0.0, text, tip)))
    return found


def _placed(marks: Sequence[tuple[float, Label]], across: Scale) -> list[Label]:
    """Return the marks in percent; of those that would lie over each other, one has all texts."""
    found: list[Label] = []
    shown = -1
    for where, mark in marks:
        at = round(100 * across(where), 2)
        if shown >= 0 and at - found[shown].at < _CLOSE:
            before = found[shown]
            found[shown] = replace(before, tip=f"{before.tip}\n{mark.tip}")
            found.append(Label(at, ""))
        else:
            found.append(replace(mark, at=at))
            shown = len(found) - 1
    return found


def _spread(ends: Sequence[Label]) -> list[Label]:
    """Move labels apart that would lie over each other."""
    found: list[Label] = []
    for end in sorted(ends, key=lambda end: -end.top):  # upwards from the lowest one
        top = end.top
        for other in found:
            if abs(other.at - end.at) < _CLOSE:
                top = min(top, other.top - 7)
        found.append(replace(end, top=round(top, 2)))
    return found


# --- scales --------------------------------------------------------------------------------


class Scale:
    """Places values between `low` and `high` on 0 to 1, linearly or by their logarithm."""

    def __init__(self, low: float, high: float, log: bool = False) -> None:
        if high - low < max(1e-12 * max(abs(low), abs(high)), _LEAST):
            room = 0.5 * abs(low) if abs(low) > _LEAST else 1.0
            low, high = (low / 2, low * 2) if log else (low - room, high + room)
        self.low, self.high, self.log = low, high, log

    def __call__(self, value: float) -> float:
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return min(1.0, max(0.0, (math.log10(value) - low) / (high - low)))
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def _values(sound: Sequence[float], log: bool, from_zero: bool) -> Scale:
    """Return the scale of a plot's values, with some room above and below them."""
    low, high = min(sound, default=0.0), max(sound, default=1.0)
    if log:
        room = (high / low) ** 0.04
        return Scale(low / room, high * room, log=True)
    if low >= 0 and (from_zero or low < 0.35 * high):
        return Scale(0.0, 1.06 * high)
    room = 0.06 * (high - low)
    return Scale(low - room, high + room)


def value_ticks(scale: Scale, count: int = 4) -> list[Tick]:
    if not scale.log:
        return _ticks(scale, _round_step((scale.high - scale.low) / count), compact)
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    for parts in ((1, 2, 5), (1, 3), (1,)):
        values = [part * 10.0**power for power in range(first, last + 1) for part in parts]
        inside = [value for value in values if scale.low <= value <= scale.high]
        if len(inside) <= count + 2:
            break
    inside = inside[:: -(-len(inside) // (count + 2))] if inside else []
    return [Tick(round(100 * scale(value), 2), compact(value)) for value in inside]


def step_ticks(scale: Scale) -> list[Tick]:
    step = max(1.0, _round_step((scale.high - scale.low) / 8))
    return _ticks(scale, step, compact)


_UNITS = (("s", 1.0, 150.0), ("min", 60.0, 9000.0), ("h", 3600.0, 260_000.0), ("d", 86400.0, 0.0))
_STEPS = (0.25, 0.5, 1, 2, 5, 10, 15, 30)
_CLOCK = {"min": _STEPS, "h": (0.25, 0.5, 1, 2, 3, 6, 12, 24)}


def clock_ticks(scale: Scale) -> list[Tick]:
    """Return ticks for seconds, in the unit that suits the end of the scale."""
    unit, size = next((u, s) for u, s, most in _UNITS if scale.high <= most or not most)
    wanted = (scale.high - scale.low) / size / 8
    step = next((s for s in _CLOCK.get(unit, ()) if s >= wanted), _round_step(wanted))
    plain = step >= 1 or unit == "s"
    found = _ticks(
        scale, step * size, lambda value: (compact if plain else _sexagesimal)(value / size)
    )
    first = [replace(tick, text=f"{tick.text} {unit}") for tick in found[:1]]
    return [*first, *found[1:]]


def _sexagesimal(value: float) -> str:
    """Return hours as hours:minutes, and minutes as minutes:seconds."""
    whole, rest = divmod(round(60 * value), 60)
    return f"{whole}:{rest:02}"


def _ticks(scale: Scale, step: float, text: Callable[[float], str]) -> list[Tick]:
    first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
    return [
        Tick(round(100 * scale(i * step), 2), text(i * step), bool(i % 2))
        for i in range(first, min(last, first + 50) + 1)
    ]


def _round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(part * power for part in (1, 2, 5, 10) if part * power >= least * 0.999)


# --- numbers as text -----------------------------------------------------------------------


def compact(value: float) -> str:
    """Return a round number as short as can be: 0.25, 150, 20k, 1e-4."""
    size = abs(value)
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if max(unit, 1e4) <= size < 1e15:
            return f"{value / unit:.4g}{letter}".replace("-", "−")
    text = f"{value:.4g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")


def short(value: float | None) -> str:
    """Return a measured value with four digits."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if 1e4 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def _json(value: float) -> float | str:
    """Return a value as JSON can have it."""
    return float(f"{value:.5g}") if math.isfinite(value) else short(value)
