"""The history of one run, read once for its page, and its attempts as rows of a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpc_ddp.core.console.units import duration
from hpc_ddp.core.journal import goodput
from hpc_ddp.core.journal.journal import FROM_LOGIN_NODE, Event, last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.explain.explain import explain
from hpc_ddp.report.explain.explanation import Explanation
from hpc_ddp.report.explain.facts import RunFacts, gather, number, text_of
from hpc_ddp.report.status.run_status import Status, status_of
from hpc_ddp.report.status.state import RunState, jobs_in_queue

_SIGNS = {"preempted": "▼", "time limit": "▼", "notice": "▼", "finished": "✓", "cancelled": "⏹"}


@dataclass(frozen=True)
class RunHistory:
    """A run, read once; `pieces` is its wall time, cut into the parts of the goodput."""

    run: RunFolder
    facts: RunFacts
    status: Status
    explanation: Explanation
    pieces: Sequence[goodput.Interval]

    @cached_property
    def attempts(self) -> dict[int, list[Event]]:
        """The events of each attempt, without the login node's."""
        attempts: dict[int, list[Event]] = {}
        for event in self.facts.events:
            if event["event"] not in FROM_LOGIN_NODE:
                attempts.setdefault(event["attempt"], []).append(event)
        return attempts

    @property
    def begin(self) -> float:
        """The begin of the wall time, in unix seconds; `end` likewise."""
        return self.pieces[0].begin if self.pieces else self.facts.now

    @property
    def end(self) -> float:
        return self.pieces[-1].end if self.pieces else self.facts.now

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The wall time by the parts of the goodput."""
        seconds = dict.fromkeys(goodput.PARTS, 0.0)
        for piece in self.pieces:
            seconds[piece.part] += piece.end - piece.begin
        return seconds


def read_run(run: RunFolder) -> RunHistory:
    """Read a run's folder, and ask Slurm."""
    facts = gather(run)
    status = status_of(run, jobs_in_queue())
    waits = status.state is RunState.WAITING
    pieces = goodput.pieces(list(facts.events), facts.now if status.state.is_live else None, waits)
    return RunHistory(run, facts, status, explain(facts), pieces)


def attempt_rows(history: RunHistory) -> list[dict[str, Any]]:
    """Return a row for each attempt: times, nodes, steps, and its end."""
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
                "began": clock(begin),
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


def _bounds(history: RunHistory, attempt: int, events: Sequence[Event]) -> tuple[float, float]:
    workers = [e["began"] for e in events if e["event"] == "worker" and e.get("began")]
    begin = min([e["time"] for e in events] + workers)
    has_verdict = any(e["event"] == "verdict" for e in events)
    if history.status.state.is_working and attempt == history.facts.newest and not has_verdict:
        return begin, history.end
    return begin, max(e["time"] for e in events)


def _steps(events: Sequence[Event]) -> str:
    """Return the first and the last step of an attempt, as text."""
    first = next((e for e in events if e["event"] in ("training", "first_step")), None)
    steps = [step for e in events if (step := number(e, "step")) is not None]
    if first is None or not steps:
        return "–"
    begin = (number(first, "step") or 0) + (first["event"] == "training")
    return f"{begin:,} to {max(steps):,}" if max(steps) >= begin else "none"


def _end_of(history: RunHistory, attempt: int, events: Sequence[Event]) -> tuple[str, str]:
    """Return the reason of an attempt's end, and a sign for it."""
    status = history.status
    if verdict := last_event(list(events), "verdict"):
        cause = text_of(verdict, "cause")
        return text_of(verdict, "why") or cause, _SIGNS.get(cause, "✕")
    if attempt == history.facts.newest:
        if status.state.is_working:
            return "goes on", "▶"
        return status.why or str(status.state), _SIGNS.get(status.state, "✕")
    last = last_event(list(events), "stopped", "failed", "finished")
    if last is None:
        return "ended without a word", "✕"
    reason = text_of(last, "error") or text_of(last, "reason") or last["event"]
    return reason, "✕" if last["event"] == "failed" else "▼"


def nodes_of(events: Sequence[Event]) -> list[str]:
    """Return the nodes of the first event that names them."""
    for event in events:
        nodes = event.get("nodes") or event.get("hosts")
        if isinstance(nodes, list):
            return [str(node) for node in nodes]
    return []


def clock(unix_s: float) -> str:
    try:
        return time.strftime("%a %d %b %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):  # a damaged journal
        return "–"


def strip(history: RunHistory, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parts along the wall time, and where attempts begin, with places in percent."""
    wall_s = history.end - history.begin
    if wall_s <= 0:
        return {}
    visible: list[goodput.Interval] = []
    for piece in history.pieces:  # one that is too short to be seen is added to the one before
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
    times = {"begin": clock(history.begin), "end": clock(history.end)}
    return {"spans": spans, "begins": begins, **times}
