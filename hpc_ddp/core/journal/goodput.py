"""Tells from a run's journal how the run has spent its time.

The wall time, from the first submit to the end or to now, is cut at the events of the journal, in
order, and each piece is given to one of `PARTS`. So the parts add up to the wall time, whatever is
missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpc_ddp.core.console.units import duration
from hpc_ddp.core.journal.events import (
    RANK_0,
    CheckpointRestored,
    CheckpointSaved,
    Finished,
    FirstStep,
    JournalEvent,
    MetricsLine,
    Stopped,
    Submitted,
    TrainingBegun,
    VerdictGiven,
    WorkerStarted,
    step_of,
)
from hpc_ddp.core.journal.journal import by_attempt, by_start, last_event

PARTS = {
    "training": "steps, and what the script does between them, less the following two",
    "saving": "the training held up by saves",
    "redone": "steps that an earlier attempt had done already",
    "starting": "srun, torchrun and its rendezvous",
    "importing": "the fork server's imports, and the script's own until it calls `start`",
    "building": "from the call of `start`: process group, model and data",
    "restoring": "reading and verifying a checkpoint",
    "running": "all of an attempt of a script that uses nothing of hpc-ddp",
    "lost": "after an attempt's last sign of progress, until its end was known",
    "queued": "before an attempt, also one that waited for somebody to continue the run",
}


OF_A_START = ("starting", "importing", "building", "restoring")


class Interval(NamedTuple):
    """A stretch of the wall time, in unix seconds, and the part that it is given to."""

    begin: float
    end: float
    part: str


_MARKS = (FirstStep, MetricsLine, Stopped, Finished)  # written as their step ends


def account(
    events: Sequence[JournalEvent], now: float | None = None, waits: bool = False
) -> dict[str, float]:
    """Return the seconds that a run has spent in each of `PARTS`, over all its attempts; all are
    0.0 without events. The parameters are those of `pieces`."""
    return seconds_of(pieces(events, now, waits))


def seconds_of(intervals: Iterable[Interval]) -> dict[str, float]:
    """Return the seconds of each of `PARTS` in some pieces of the wall time; 0.0 for a part without
    a piece."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for interval in intervals:
        seconds[interval.part] += interval.end - interval.begin
    return seconds


def pieces(
    events: Sequence[JournalEvent], now: float | None = None, waits: bool = False
) -> list[Interval]:
    """Cut a run's wall time into pieces, each given to one of `PARTS`, in order and without gaps;
    [] for a journal without events.

    Parameters
    ----------
    events
        the run's journal, by attempt and time
    now
        unix time of the end, for a run that still goes on; None: its last event
    waits
        the run is not at work now, though its newest attempt has no verdict (its node was lost,
        say) and `now` is given: the time since its last event counts as queued

    Notes
    -----
    The wall time begins with the submit before attempt 0; without one with the first event, or
    the start of the first worker's process, where that is earlier. An attempt that begins below
    the highest step of earlier ones does steps again, until it has passed this step; the moment
    lies between two `metrics` in proportion. Such steps count as redone, and where they came
    first as training.
    """
    if not events:
        return []
    attempts = by_attempt(events)
    # The submits before attempt 0. A task of an array has none, unless it was submitted alone.
    submitted = [e.time for e in events if isinstance(e, Submitted) and not e.first_attempt]
    times = [e.time for e in events]
    begin = min(submitted or [*times, *(_start_time(attempt) for attempt in attempts.values())])
    clock = _Clock(begin, max(times) if now is None else now)
    is_reported = any(event.writer == RANK_0 for event in events)  # by hpc_ddp.training
    highest = 0.0
    for number, attempt in attempts.items():
        live = now is not None and not waits and number == max(attempts)
        if is_reported:
            starts = by_start(attempt)
            for start in starts:
                clock.until(_start_time(start), "queued" if start is starts[0] else "lost")
                _give_start(clock, start, highest, live and start is starts[-1])
                highest = max([highest, *(step for _, step in _steps_of(start))])
        else:
            clock.until(_start_time(attempt), "queued")
            clock.until(_end_time(attempt, live), "running")
    clock.until(math.inf, "queued")
    return clock.pieces


def share(seconds: dict[str, float]) -> float | None:
    """Return the goodput, from 0 to 1: the part of all time not spent queued in which steps were
    done for the first time.

    `seconds` is by part, as `account` returns it. None where nothing has started, or the script
    does not report its training.
    """
    wall = sum(seconds.values()) - seconds["queued"]
    return seconds["training"] / wall if wall > 0 and not seconds["running"] else None


def start_costs(seconds: dict[str, float]) -> str:
    """Return a sentence on the time that the starts took, where that is a tenth or more of all time
    not spent queued; '' where it is less, and for a script that does not report its training.
    `seconds` is by part, as `account` returns it."""
    starts = {part: seconds[part] for part in OF_A_START if seconds[part]}
    most = max(starts, key=seconds.__getitem__, default="")
    wall = sum(seconds.values()) - seconds["queued"]
    if not most or seconds["running"] or sum(starts.values()) < wall / 10:
        return ""
    parts = ", ".join(f"{duration(spent)} {part}" for part, spent in starts.items())
    percent = f"{100 * sum(starts.values()) / wall:.0f} %"
    return f"Starts took {percent} of its time ({parts}), mostly {most}: {PARTS[most]}."


def line(seconds: dict[str, float]) -> str:
    """Return one line for people, with the goodput and the time of each part, except parts whose
    time is rounded to 0.0 s. `seconds` is by part, as `account` returns it."""
    goodput = share(seconds)
    parts = [f"{text} {part}" for part in PARTS if (text := duration(seconds[part])) != "0.0 s"]
    percent = "-" if goodput is None else f"{100 * goodput:.0f} %"
    return f"goodput {percent}: {', '.join(parts) or 'nothing yet'}"


class _Clock:
    """Goes through the wall time once, from `start` to `end` in unix seconds, and collects its
    `pieces`, each given to one of `PARTS`; `at` is where the clock stands."""

    def __init__(self, start: float, end: float) -> None:
        self.at, self._end = start, max(start, end)
        self.pieces: list[Interval] = []

    def until(self, when: float | None, part: str) -> None:
        """Give the time from the clock's `at` up to `when`, in unix seconds, to a part, and move
        `at` there; `end` is the last moment. For None, or a time before `at`, nothing happens:
        clocks of hosts differ."""
        if when is not None and (when := min(when, self._end)) > self.at:
            begin = self.at
            if self.pieces and self.pieces[-1].part == part:  # one piece in place of two
                begin = self.pieces.pop().begin
            self.pieces.append(Interval(begin, when, part))
            self.at = when


def _give_start(clock: _Clock, events: list[JournalEvent], highest: float, live: bool) -> None:
    """Give the time of one start of the workers to its parts, and move the `clock` to its end.

    `events` are those of the start, `highest` is the highest step of earlier starts, and with
    `live` the start may still go on.
    """
    if worker := last_event(events, WorkerStarted):
        clock.until(worker.imports_began, "starting")
        clock.until(worker.imports_ended, "importing")
        clock.until(worker.began, "starting")
        clock.until(worker.called, "importing")
    if restored := last_event(events, CheckpointRestored):
        clock.until(restored.time - restored.restore_s, "building")
        clock.until(restored.time, "restoring")
    end = _end_time(events, live)
    is_live = end == math.inf
    if entered := last_event(events, TrainingBegun) or last_event(events, FirstStep):
        clock.until(entered.time, "building")
        _give_training(clock, events, highest, is_live)
    else:
        signs_of_life = [event for event in events if not isinstance(event, VerdictGiven)]
        clock.until(_end_time(signs_of_life, is_live), "building" if worker else "starting")
    clock.until(end, "lost")


def _give_training(clock: _Clock, events: list[JournalEvent], highest: float, live: bool) -> None:
    """Give the time of a start's training to the training, its saves, and steps that are done
    again. Move the `clock` to the last sign of progress, or to now where the start is `live` and
    goes on.

    `events` are those of the start, `highest` is the highest step of earlier starts.
    """
    begin = clock.at
    saves = [event for event in events if isinstance(event, CheckpointSaved)]
    marks = [event for event in events if isinstance(event, _MARKS)]
    entered = [event for event in events if isinstance(event, TrainingBegun)]
    passed = _time_of_passing(begin, list(_steps_of([*entered, *marks])), highest)
    has_ended = not live or (marks and isinstance(marks[-1], (Stopped, Finished)))
    end = max((event.time for event in (*marks, *saves)), default=begin) if has_ended else math.inf

    def work(until: float) -> None:
        """Give the time up to `until` to steps that are done again, up to the moment `passed`, and
        from then on to the training."""
        clock.until(min(until, passed), "redone")
        clock.until(until, "training")

    for save in saves:
        # The event comes when all is durable; the stall was at the beginning of the write.
        work(save.time - max(save.stall_s, save.write_s))
        clock.until(min(clock.at + save.stall_s, end), "saving")
    work(end)


def _time_of_passing(begin: float, steps: list[tuple[float, float]], highest: float) -> float:
    """Return when a start whose training begins at `begin` had passed the step `highest`.

    `steps` are its pairs of time and step, in order. Times are unix seconds: inf where the start
    has not passed `highest`, `begin` where it began there or beyond. Between two pairs the moment
    is interpolated.
    """
    if not highest or (steps and steps[0][1] >= highest):
        return begin
    before = (begin, 0.0)
    for when, step in steps:
        if step >= highest:
            part = (highest - before[1]) / (step - before[1])
            return before[0] + part * (when - before[0])
        before = (when, step)
    return math.inf


def _steps_of(events: Iterable[JournalEvent]) -> Iterator[tuple[float, float]]:
    """Yield the time (unix seconds) and the step of each event that has a step."""
    for event in events:
        step = step_of(event)
        if step is not None:
            yield event.time, step


def _start_time(events: list[JournalEvent]) -> float:
    """Return when an attempt or a start began, in unix seconds, by its `events`, one or more. That
    may be before the first event: without a launcher the worker's process is there first."""
    workers = [event for event in events if isinstance(event, WorkerStarted)]
    return min([events[0].time, *(worker.began for worker in workers if worker.began is not None)])


def _end_time(events: list[JournalEvent], live: bool) -> float:
    """Return when an attempt or a start ended, in unix seconds: at the last of its `events`, -inf
    where there are none. Return inf while it goes on: it is `live`, and has no verdict."""
    if live and last_event(events, VerdictGiven) is None:
        return math.inf
    return max((event.time for event in events), default=-math.inf)
