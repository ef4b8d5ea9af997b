"""The history of one run, read once for its page, and its attempts as rows of a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpc_ddp.core.console.units import duration
from hpc_ddp.core.journal import goodput
from hpc_ddp.core.journal.events import (
    Finished,
    FirstStep,
    JournalEvent,
    RankFailed,
    Started,
    Stopped,
    TrainingBegun,
    VerdictGiven,
    WorkerStarted,
    step_of,
)
from hpc_ddp.core.journal.journal import by_attempt, last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import read_queue
from hpc_ddp.report.explain.explain import explain
from hpc_ddp.report.explain.explanation import Explanation
from hpc_ddp.report.explain.facts import RunFacts, gather
from hpc_ddp.report.status.run_state import RunState
from hpc_ddp.report.status.run_status import Status, summarize

# The sign of an attempt's end, by its cause or state; others have ✕.
_SIGNS = {"preempted": "▼", "time limit": "▼", "notice": "▼", "finished": "✓", "cancelled": "⏹"}


@dataclass(frozen=True)
class RunHistory:
    """A run, read once; `pieces` are the intervals of its wall time, in order, with the part of the
    goodput that each belongs to."""

    run: RunFolder
    facts: RunFacts
    status: Status
    explanation: Explanation
    pieces: Sequence[goodput.Interval]

    @cached_property
    def attempts(self) -> dict[int, list[JournalEvent]]:
        """The events of each attempt, by its number, without the login node's."""
        return by_attempt(self.facts.events)

    @property
    def begin(self) -> float:
        """The begin of the wall time, in unix seconds; without wall time the time at which the run
        was read."""
        return self.pieces[0].begin if self.pieces else self.facts.now

    @property
    def end(self) -> float:
        """The end of the wall time, in unix seconds; without wall time the time at which the run
        was read."""
        return self.pieces[-1].end if self.pieces else self.facts.now

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The seconds of the wall time by the parts of the goodput."""
        return goodput.seconds_of(self.pieces)


def read_run(run: RunFolder) -> RunHistory:
    """Read a run's folder, query Slurm (also for its last jobs), and return the run's history.
    Without an answer of Slurm the state is the journal's, or ``unknown`` where the journal leaves
    it open. Raise OSError where the journal can't be read."""
    events = run.events()
    facts = gather(run, events)
    status = summarize(run, events, run.jobs(events), read_queue())
    waits = status.state is RunState.WAITING
    pieces = goodput.pieces(facts.events, facts.now if status.state.is_live else None, waits)
    return RunHistory(run, facts, status, explain(facts), pieces)


def attempt_rows(history: RunHistory) -> list[dict[str, Any]]:
    """Return a row for each attempt, in order; [] before the first.

    A row has by name: ``number``; ``begin`` in unix seconds; ``nodes``, a list; and as text
    ``began`` (the begin), ``waited`` (since the end of the attempt before), ``lasted``, ``place``
    (a few words for the nodes), ``steps``, ``end`` (its reason), and the ``sign`` of the end.
    """
    rows = []
    end_before = history.begin
    for attempt, events in history.attempts.items():
        begin, end = _bounds(history, attempt, events)
        reason, sign = _end_of(history, attempt, events)
        nodes = nodes_of(events)
        rows.append(
            {
                "number": attempt,
                "begin": begin,
                "began": format_time(begin),
                "waited": duration(max(0.0, begin - end_before)),
                "lasted": duration(max(0.0, end - begin)),
                "nodes": nodes,
                "place": ", ".join(nodes) if len(nodes) <= 3 else f"{len(nodes)} nodes",
                "steps": _steps(events),
                "end": reason,
                "sign": sign,
            }
        )
        end_before = end
    return rows


def _bounds(
    history: RunHistory, attempt: int, events: Sequence[JournalEvent]
) -> tuple[float, float]:
    """Return begin and end of an attempt, in unix seconds, by its `events`, one or more. An attempt
    that is at work ends with the run's wall time."""
    times = [event.time for event in events]
    workers = [event.began for event in events if isinstance(event, WorkerStarted)]
    begin = min([*times, *(began for began in workers if began)])
    is_open = attempt == history.facts.newest and last_event(events, VerdictGiven) is None
    return begin, history.end if is_open and history.status.state.is_working else max(times)


def _steps(events: Sequence[JournalEvent]) -> str:
    """Return the first and the last step of an attempt, as ``1 to 400``; ``none`` where its
    training began and did no step, ``–`` where it never began."""
    first = next((e for e in events if isinstance(e, (TrainingBegun, FirstStep))), None)
    if first is None:
        return "–"
    steps = [step for step in map(step_of, events) if step is not None]
    begin = first.step + 1 if isinstance(first, TrainingBegun) else first.step
    return f"{begin:,} to {max(steps):,}" if max(steps) >= begin else "none"


def _end_of(history: RunHistory, attempt: int, events: Sequence[JournalEvent]) -> tuple[str, str]:
    """Return the reason of an attempt's end as text, and a sign for it; ``goes on`` and ``▶`` for
    an attempt that is at work. The reason comes from the attempt's verdict, else, for the newest
    attempt, from the run's status, else from the last of its events that tells of an end."""
    status = history.status
    if verdict := last_event(events, VerdictGiven):
        return verdict.why or verdict.cause, _SIGNS.get(verdict.cause, "✕")
    if attempt == history.facts.newest:
        if status.state.is_working:
            return "goes on", "▶"
        return status.why or str(status.state), _SIGNS.get(status.state, "✕")
    last = last_event(events, Stopped, RankFailed, Finished)
    if isinstance(last, RankFailed):
        return last.error, "✕"
    if last is None:
        return "ended without a word", "✕"
    return last.reason if isinstance(last, Stopped) else last.event, "▼"


def nodes_of(events: Sequence[JournalEvent]) -> list[str]:
    """Return the nodes of the first event that names them; [] without one."""
    for event in events:
        if isinstance(event, Started) and event.nodes:
            return list(event.nodes)
        if isinstance(event, FirstStep):
            return list(event.hosts)
    return []


def format_time(unix_s: float) -> str:
    """Return a time as text, ``Mon 23 Nov 03:08:30``; ``–`` for an impossible time."""
    try:
        return time.strftime("%a %d %b %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):  # a damaged journal
        return "–"


def make_strip(history: RunHistory, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the strip that shows the run's wall time, by name: ``spans``, each with its ``part``,
    its ``width`` and a ``title``; ``begins``, (place, number) of the attempts; and ``begin`` and
    ``end`` of the wall time as text. Widths and places are in percent of the wall time. {} without
    wall time.

    `rows` are those of `attempt_rows`. A span that is too short to be seen is added to the span
    before it. An attempt whose number would overlap that of an earlier one is left out.
    """
    wall_s = history.end - history.begin
    if wall_s <= 0:
        return {}
    visible: list[goodput.Interval] = []
    for piece in history.pieces:
        is_short = piece.end - piece.begin < wall_s / 1000
        if visible and (is_short or piece.part == visible[-1].part):
            visible[-1] = visible[-1]._replace(end=piece.end)
        else:
            visible.append(piece)
    spans = []
    for piece in visible:
        length_s = piece.end - piece.begin
        title = f"{piece.part}, {duration(length_s)}"
        spans.append({"part": piece.part, "width": 100 * length_s / wall_s, "title": title})
    begins: list[tuple[float, int]] = []
    for row in rows:
        at = 100 * (row["begin"] - history.begin) / wall_s
        if not begins or at - begins[-1][0] > 2.5:  # as wide as a number
            begins.append((at, row["number"]))
    times = {"begin": format_time(history.begin), "end": format_time(history.end)}
    return {"spans": spans, "begins": begins, **times}
