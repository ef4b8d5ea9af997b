"""A run's attempts, as a table and along the wall time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpc_ddp.report.charts import Scale, clock_ticks
from hpc_ddp.report.curves import number
from hpc_ddp.report.evidence import text_of
from hpc_ddp.report.story import (
    AT_WORK,
    Story,
    clock,
    natural,
    nodes_of,
    span,
)
from hpc_ddp.run import goodput
from hpc_ddp.run.journal import Event, last_event

MOST_NODES = 12  # with a line of their own
_ENDED = {"preempted": "▼", "time limit": "▼", "notice": "▼", "finished": "✓", "cancelled": "⏹"}


def attempts_of(story: Story) -> list[dict[str, Any]]:
    """Return a row for each attempt: when, how long it waited and lasted, where, and its end."""
    rows = []
    before = story.begin
    for attempt, events in story.attempts.items():
        begin, end = _bounds(story, attempt, events)
        entered = [e for e in events if e["event"] in ("training", "first_step")]
        steps = [s for e in events if (s := number(e.get("step"))) is not None]
        nodes = nodes_of(events)
        ended, sign = _how_it_ended(story, attempt, events)
        rows.append(
            {
                "number": attempt,
                "begin": begin,
                "end": end,
                "began": clock(begin),
                "waited": span(max(0.0, begin - before)),
                "lasted": span(end - begin),
                "nodes": nodes,
                "place": _few(nodes),
                "steps": _steps_told(entered, steps),
                "ended": ended,
                "sign": sign,
            }
        )
        before = end
    return rows


def _bounds(story: Story, attempt: int, events: Sequence[Event]) -> tuple[float, float]:
    began = [number(e.get("began")) for e in events if e["event"] == "worker"]
    begin = min([e["time"] for e in events] + [each for each in began if each])
    verdict = any(e["event"] == "verdict" for e in events)
    live = story.status.state in AT_WORK and attempt == story.facts.newest and not verdict
    return begin, story.end if live else max(e["time"] for e in events)


def _steps_told(entered: Sequence[Event], steps: Sequence[float]) -> str:
    if not entered or not steps:
        return ""
    first = int(number(entered[0].get("step")) or 0) + (entered[0]["event"] == "training")
    last = int(max(steps))
    return f"{first:,} to {last:,}" if last >= first else "none"


def _how_it_ended(story: Story, attempt: int, events: Sequence[Event]) -> tuple[str, str]:
    verdict = last_event(list(events), "verdict")
    if verdict:
        cause = text_of(verdict, "cause")
        return text_of(verdict, "why") or cause, _ENDED.get(cause, "✕")
    if attempt == story.facts.newest:
        if story.status.state in AT_WORK:
            return "goes on", "▶"
        return story.status.why or story.status.state, _ENDED.get(story.status.state, "✕")
    said = last_event(list(events), "stopped", "failed", "finished")
    if said is None:
        return "ended without a word", "✕"
    why = text_of(said, "error") or text_of(said, "reason") or said["event"]
    return why, "✕" if said["event"] == "failed" else "▼"


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} nodes"


def timeline(story: Story) -> dict[str, Any]:
    """Return the lanes of the timeline, with places in percent of the wall time."""
    wall = story.end - story.begin
    if wall <= 0:
        return {}
    scale = Scale(0.0, wall)

    def at(when: float) -> float:
        return round(100 * scale(when - story.begin), 3)

    def stretch(begin: float, end: float, kind: str, text: str, tip: str) -> dict[str, Any]:
        left = at(begin)
        wide = max(0.0, round(at(end) - left, 3))
        return {"left": left, "width": wide, "kind": kind, "text": text, "tip": tip}

    rows = attempts_of(story)
    parts = [
        stretch(p.begin, p.end, f"p-{p.part}", "", f"{p.part}, {span(p.end - p.begin)}")
        for p in _visible(story.pieces, wall / 1000)
    ]
    saves, notices = _save_marks(story, at), _notice_marks(story, rows, at)
    starts = [
        stretch(r["begin"], r["end"], "attempt", str(r["number"]), _attempt_tip(r)) for r in rows
    ]
    lanes = [_lane("attempt", starts), _lane("phase", parts)]
    lanes += [_lane("saves", marks=saves)] if saves else []
    lanes += [_lane("notices", marks=notices)] if notices else []
    return {
        "lanes": [*lanes, *_node_lanes(rows, stretch, _bad_nodes(story))],
        "ticks": clock_ticks(scale),
        "begin": clock(story.begin),
        "end": clock(story.end),
    }


def _visible(pieces: Sequence[goodput.Piece], least: float) -> list[goodput.Piece]:
    """Return the pieces that can be seen; those below `least` seconds go to the one before."""
    found: list[goodput.Piece] = []
    for piece in pieces:
        if found and (piece.end - piece.begin < least or piece.part == found[-1].part):
            found[-1] = found[-1]._replace(end=piece.end)
        else:
            found.append(piece)
    return found


def _lane(
    label: str, spans: Sequence[dict[str, Any]] = (), marks: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {"label": label, "spans": spans, "marks": marks}


def _attempt_tip(row: Mapping[str, Any]) -> str:
    told = [f"attempt {row['number']}, {row['lasted']}", f"began {row['began']}"]
    told += [f"steps {row['steps']}"] if row["steps"] else []
    return "\n".join([*told, f"{row['sign']} {row['ended']}"])


def _save_marks(story: Story, at: Any) -> list[dict[str, Any]]:
    """Return a dot for each checkpoint; of those that would lie over each other, one."""
    found: list[dict[str, Any]] = []
    for event in story.events:
        if event["event"] not in ("checkpoint", "save_failed"):
            continue
        bad = event["event"] == "save_failed"
        place, step = at(event["time"]), int(number(event.get("step")) or 0)
        if found and place - found[-1]["left"] < 0.6 and found[-1]["bad"] == bad:
            found[-1]["steps"].append(step)
        else:
            found.append({"left": place, "steps": [step], "bad": bad})
    for mark in found:
        steps = mark.pop("steps")
        which = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
        mark["tip"] = f"{'SAVE FAILED' if mark['bad'] else 'saved'}: {which}" + (
            f" ({len(steps)} checkpoints)" if len(steps) > 1 else ""
        )
        mark["sign"], mark["kind"] = ("✕", "bad") if mark.pop("bad") else ("", "dot")
    return found


def _notice_marks(story: Story, rows: Sequence[Mapping[str, Any]], at: Any) -> list[dict[str, Any]]:
    """Return the first notice of each attempt, what failed first in it, and how it ended."""
    found = []
    for row in rows:
        events = story.attempts[row["number"]]
        verdict = last_event(events, "verdict") or {}
        notice = next((e for e in events if e["event"] == "notice"), None)
        failed = next((e for e in events if e["event"] == "failed"), None)
        if notice:
            tip = f"notice: {text_of(notice, 'source') or 'to stop'}"
            tip += f"\nattempt {row['number']}: {row['ended']}"
            found.append({"left": at(notice["time"]), "sign": "▼", "kind": "warn", "tip": tip})
        if failed:
            tip = f"rank {failed.get('rank')} failed: {text_of(failed, 'error')}"
            found.append({"left": at(failed["time"]), "sign": "✕", "kind": "bad", "tip": tip})
        if row["sign"] in ("✓", "✕") and not failed:
            tip = f"attempt {row['number']}: {row['ended']}"
            kind = "good" if row["sign"] == "✓" else "bad"
            when = verdict.get("time", row["end"])
            found.append({"left": at(when), "sign": row["sign"], "kind": kind, "tip": tip})
    return found


def _bad_nodes(story: Story) -> dict[int, set[str]]:
    """Return the nodes that were found bad, by attempt."""
    found: dict[int, set[str]] = {}
    for event in story.events:
        listed = event.get("bad_nodes")
        if event["event"] in ("preflight", "verdict") and isinstance(listed, list):
            found.setdefault(event["attempt"], set()).update(map(str, listed))
    return found


def _node_lanes(
    rows: Sequence[Mapping[str, Any]], stretch: Any, bad: Mapping[int, set[str]]
) -> list[dict[str, Any]]:
    """Return a lane for each node; of many one for all, and one for each that was bad."""
    names = sorted({node for row in rows for node in row["nodes"]}, key=natural)
    many = len(names) > MOST_NODES
    shown = [n for n in names if any(n in nodes for nodes in bad.values())] if many else names
    lanes = []
    if many:
        spans = [
            stretch(r["begin"], r["end"], "node many", f"{len(r['nodes'])}", ", ".join(r["nodes"]))
            for r in rows
        ]
        lanes.append(_lane("nodes", spans))
    for node in shown[:MOST_NODES]:
        spans = []
        for row in rows:
            if node in row["nodes"]:
                is_bad = node in bad.get(row["number"], ())
                tip = f"{node}, attempt {row['number']}" + ("\nfound bad" if is_bad else "")
                kind = "node bad" if is_bad else "node"
                text = "bad" if is_bad else ""
                spans.append(stretch(row["begin"], row["end"], kind, text, tip))
        lanes.append(_lane(node, spans))
    return lanes
