"""A run, or several side by side, as one HTML page that needs nothing else.

What is told comes from the journal, `explain` and `status`; what is drawn from
`hpc_ddp.report.charts`; how it looks is ``templates/report.html.j2``.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from hpc_ddp import __version__, slurm
from hpc_ddp.report import preflight as report_preflight
from hpc_ddp.report import sweep as report_sweep
from hpc_ddp.report.charts import Scale, charts, clock_ticks, short
from hpc_ddp.report.curves import Curve, curves_of, number, starts_of
from hpc_ddp.report.evidence import Facts, gather, text_of
from hpc_ddp.report.explain import Explanation, explain
from hpc_ddp.report.logs import log_files
from hpc_ddp.report.status import Status, queue, status_of
from hpc_ddp.run import checkpoints, goodput
from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.folder import RunFolder, read_tail
from hpc_ddp.run.journal import FROM_LOGIN_NODE, Event, last_event, node_seconds
from hpc_ddp.run.spec import JobSpec

MOST_CURVES = 12  # runs in one chart
MOST_METRICS = 24
MOST_NODES = 12  # with a line of their own
MOST_ROWS = 200  # of a table
_TEXT_BYTES = 48 * 1024  # of a script or log
_AT_WORK = ("running", "starting", "ending", "suspended")

_LOOKS = {  # state: a sign beside its word, and the kind of colour
    "finished": ("✓", "good"),
    "running": ("▶", "busy"),
    "starting": ("▶", "busy"),
    "ending": ("▶", "busy"),
    "waiting": ("…", "calm"),
    "rendered": ("○", "calm"),
    "suspended": ("⏸", "warn"),
    "stopped": ("⏸", "warn"),
    "cancelled": ("⏹", "warn"),
    "array": ("▤", "calm"),
}


def report(run: RunFolder, templates: Path) -> str:
    """Return a run's page; an array's compares its tasks. `templates` is the folder of these."""
    jobs = queue()
    tasks = report_sweep.tasks(run, jobs) if _spec(run) else []
    if tasks:
        return _comparison(_task_rows(run, tasks, jobs), _sweep_title(run, tasks), templates)
    story = _story(run, jobs)
    return _filled(templates, page="run", title=run.name, **_told(story))


def comparison(runs: Sequence[RunFolder], templates: Path) -> str:
    """Return a page with several runs side by side."""
    jobs = queue()
    stories = [_story(run, jobs) for run in runs]
    rows = [_Row(_letters(i), story, {}) for i, story in enumerate(stories)]
    names = list(dict.fromkeys(run.name for run in runs))
    title = {"title": " and ".join(names[:3]), "about": f"{len(runs)} runs side by side."}
    return _comparison(rows, title, templates)


def _filled(templates: Path, **values: Any) -> str:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["short"] = short
    written = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime())
    template = env.get_template("report.html.j2")
    return template.render(version=__version__, written=written, parts=goodput.PARTS, **values)


# --- what is known of a run ----------------------------------------------------------------


@dataclass(frozen=True)
class _Story:
    """A run, read once: `begin` and `end` of its wall time in unix seconds."""

    run: RunFolder
    facts: Facts
    status: Status
    found: Explanation
    pieces: Sequence[goodput.Piece]
    curves: Mapping[str, Curve]

    @property
    def events(self) -> list[Event]:
        return list(self.facts.events)

    @property
    def begin(self) -> float:
        return self.pieces[0].begin if self.pieces else self.facts.now

    @property
    def end(self) -> float:
        return self.pieces[-1].end if self.pieces else self.facts.now

    @property
    def seconds(self) -> dict[str, float]:
        return self.status.seconds

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())


def _story(run: RunFolder, jobs: Mapping[str, slurm.Queued]) -> _Story:
    facts = gather(run)
    status = status_of(run, jobs)
    waits = status.state == "waiting"
    now = facts.now if waits or status.state in _AT_WORK else None
    pieces = goodput.pieces(list(facts.events), now, waits)
    begin = pieces[0].begin if pieces else 0.0
    return _Story(run, facts, status, explain(facts), pieces, curves_of(facts.events, begin))


def _told(story: _Story) -> dict[str, Any]:
    """Return all that the page of one run shows."""
    attempts = _attempts(story)
    causes = {row["number"]: row["ended"] for row in attempts}
    names = list(story.curves)[:MOST_METRICS]
    starts = starts_of(story.facts.events, story.begin)
    return {
        "head": _head(story),
        "tiles": _tiles(story),
        "bar": _bar(story.seconds),
        "timeline": _timeline(story),
        "attempts": attempts[-MOST_ROWS:],
        "charts": charts(names, [("", dict(story.curves))], starts, causes),
        "left_out": list(story.curves)[MOST_METRICS:],
        "ranks": _ranks(story.facts),
        "saves": _saves(story),
        "preflights": _preflights(story.facts),
        "end": _end(story),
        "settings": _settings(story),
        "texts": _texts(story),
    }


def _head(story: _Story) -> dict[str, Any]:
    sign, look = _LOOKS.get(story.status.state, ("✕", "bad"))
    return {
        "name": story.run.name,
        "id": story.run.id,
        "path": str(story.run.path),
        "job": story.status.job_id,
        "state": story.status.state,
        "sign": sign,
        "look": look,
        "text": story.found.text,
        "hint": story.found.hint,
    }


def _tiles(story: _Story) -> list[tuple[str, str, str]]:
    """Return the figures at the top: what, how much, and what is worth adding."""
    status, curves = story.status, story.curves
    tiles: list[tuple[str, str, str]] = []
    if (step := number(status.step)) is not None:
        total = number(status.total_steps)
        tiles.append(("step", _count(step), f"of {_count(total)}" if total else ""))
    if loss := curves.get("loss"):
        least = min(
            (loss.values[i] for i in loss.kept() if loss.values[i] < math.inf), default=None
        )
        tiles.append(("loss", short(loss.last), f"lowest {short(least)}"))
    for name, value in status.results.items():
        tiles.append((name, short(number(value)), "result"))
    if status.goodput is not None:
        tiles.append(("goodput", f"{status.goodput:.0%}", "queue excluded"))
    count = len({e["attempt"] for e in story.events if e["event"] not in FROM_LOGIN_NODE})
    if count:
        first = next((e for e in story.events if e["event"] == "first_step"), {})
        world = number(first.get("world_size"))
        tiles.append(("attempts", str(count), f"{world:.0f} ranks" if world else ""))
        queued = story.seconds["queued"]
        tiles.append(("wall time", span(story.wall_s), f"{span(queued)} queued"))
    if (speed := curves.get("samples_per_s")) and speed.finite:
        tiles.append(("samples/s", short(float(f"{median(speed.finite):.4g}")), "median"))
    spec = _spec(story.run)
    hours = node_seconds(story.events, story.end) * spec.gpus_in_use / 3600 if spec else 0.0
    if spec and hours:
        what = "GPU hours" if spec.gpu_count else "worker hours"
        tiles.append((what, short(float(f"{hours:.3g}")), ""))
    return tiles


def _spec(run: RunFolder) -> JobSpec | None:
    try:
        return JobSpec.from_json(run.job_json.read_text())
    except (OSError, ValueError, HpcDdpError):
        return None


def _bar(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the parts of the wall time that are not zero, with their shares in percent."""
    wall = sum(seconds.values())
    return [
        {"part": part, "time": span(value), "share": 100 * value / wall}
        for part, value in seconds.items()
        if wall > 0 and value >= 0.05
    ]


# --- attempts, and the timeline ------------------------------------------------------------

_ENDED = {"preempted": "▼", "time limit": "▼", "notice": "▼", "finished": "✓", "cancelled": "⏹"}


def _attempts(story: _Story) -> list[dict[str, Any]]:
    """Return a row for each attempt: when, how long it waited and lasted, where, and its end."""
    rows = []
    before = story.begin
    numbers = sorted({e["attempt"] for e in story.events if e["event"] not in FROM_LOGIN_NODE})
    for attempt in numbers:
        events = [e for e in _own(story) if e["attempt"] == attempt]
        begin, end = _bounds(story, attempt, events)
        entered = [e for e in events if e["event"] in ("training", "first_step")]
        steps = [s for e in events if (s := number(e.get("step"))) is not None]
        nodes = _nodes_of(events)
        ended, sign = _how_it_ended(story, attempt, events)
        rows.append(
            {
                "number": attempt,
                "begin": begin,
                "end": end,
                "began": _clock(begin),
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


def _own(story: _Story) -> list[Event]:
    return [e for e in story.events if e["event"] not in FROM_LOGIN_NODE]


def _bounds(story: _Story, attempt: int, events: Sequence[Event]) -> tuple[float, float]:
    began = [number(e.get("began")) for e in events if e["event"] == "worker"]
    begin = min([e["time"] for e in events] + [each for each in began if each])
    verdict = any(e["event"] == "verdict" for e in events)
    live = story.status.state in _AT_WORK and attempt == story.facts.newest and not verdict
    return begin, story.end if live else max(e["time"] for e in events)


def _nodes_of(events: Sequence[Event]) -> list[str]:
    listed = [e.get("nodes") or e.get("hosts") for e in events]
    return next(([str(node) for node in each] for each in listed if isinstance(each, list)), [])


def _steps_told(entered: Sequence[Event], steps: Sequence[float]) -> str:
    if not entered or not steps:
        return ""
    first = int(number(entered[0].get("step")) or 0) + (entered[0]["event"] == "training")
    last = int(max(steps))
    return f"{first:,} to {last:,}" if last >= first else "none"


def _how_it_ended(story: _Story, attempt: int, events: Sequence[Event]) -> tuple[str, str]:
    verdict = last_event(list(events), "verdict")
    if verdict:
        cause = text_of(verdict, "cause")
        return text_of(verdict, "why") or cause, _ENDED.get(cause, "✕")
    if attempt == story.facts.newest:
        if story.status.state in _AT_WORK:
            return "goes on", "▶"
        return story.status.why or story.status.state, _ENDED.get(story.status.state, "✕")
    said = last_event(list(events), "stopped", "failed", "finished")
    if said is None:
        return "ended without a word", "✕"
    why = text_of(said, "error") or text_of(said, "reason") or said["event"]
    return why, "✕" if said["event"] == "failed" else "▼"


def _timeline(story: _Story) -> dict[str, Any]:
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

    rows = _attempts(story)
    parts = [
        stretch(
            p.begin,
            p.end,
            f"p-{p.part}",
            "",
            f"{p.part}, {span(p.end - p.begin)}\n{goodput.PARTS[p.part]}",
        )
        for p in story.pieces
        if p.end - p.begin > wall / 5000
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
        "begin": _clock(story.begin),
        "end": _clock(story.end),
    }


def _lane(
    label: str, spans: Sequence[dict[str, Any]] = (), marks: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {"label": label, "spans": spans, "marks": marks}


def _attempt_tip(row: Mapping[str, Any]) -> str:
    told = [f"attempt {row['number']}, {row['lasted']}", f"began {row['began']}"]
    told += [f"steps {row['steps']}"] if row["steps"] else []
    return "\n".join([*told, f"{row['sign']} {row['ended']}"])


def _save_marks(story: _Story, at: Any) -> list[dict[str, Any]]:
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


def _notice_marks(
    story: _Story, rows: Sequence[Mapping[str, Any]], at: Any
) -> list[dict[str, Any]]:
    """Return the first notice of each attempt, what failed first in it, and how it ended."""
    found = []
    for row in rows:
        events = [e for e in _own(story) if e["attempt"] == row["number"]]
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


def _bad_nodes(story: _Story) -> dict[int, set[str]]:
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
    names = sorted({node for row in rows for node in row["nodes"]}, key=_natural)
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


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(p) if p.isdecimal() else -1, p) for p in re.split(r"(\d+)", name)]


# --- ranks, checkpoints, preflights --------------------------------------------------------


def _ranks(facts: Facts) -> dict[str, Any]:
    """Return each rank's own time per step in the newest attempt that told of it, slowest first."""
    told = facts.of("ranks")
    told = [e for e in told if e["attempt"] == told[-1]["attempt"]]
    name = "busy_s" if any(_numbers(e.get("busy_s")) for e in told) else "data_s"
    lists = [_numbers(e.get(name)) for e in told]
    sizes = [len(each) for each in lists if each]
    if not sizes:
        return {}
    lists = [each for each in lists if len(each) == sizes[-1]]
    means = [sum(each) / len(lists) for each in zip(*lists, strict=True)]
    usual, most = median(means), max(means) or 1.0
    nodes = {e.get("slowest"): text_of(e, "node") for e in told}
    order = sorted(range(len(means)), key=lambda rank: -means[rank])
    rows = [
        {
            "rank": rank,
            "node": nodes.get(rank, ""),
            "ms": f"{1000 * means[rank]:.4g} ms",
            "more": f"{100 * (means[rank] / usual - 1):+.0f} %" if usual else "",
            "width": round(100 * means[rank] / most, 1),
            "slow": bool(usual) and means[rank] > 1.25 * usual,
        }
        for rank in order[:8]
    ]
    what = "waiting for data" if name == "data_s" else "of a rank's own"
    return {
        "rows": rows,
        "count": len(means),
        "usual": f"{1000 * usual:.4g} ms",
        "what": what,
        "at": round(100 * usual / most, 1),
        "attempt": told[-1]["attempt"],
    }


def _numbers(value: Any) -> list[float]:
    good = isinstance(value, list) and all(isinstance(v, (int, float)) for v in value)
    return [max(0.0, float(v)) for v in value] if good else []


def _saves(story: _Story) -> dict[str, Any]:
    """Return what is known of the checkpoints, newest first, and in sum."""
    there = {checkpoints.step_of(path) for path in checkpoints.published(story.run.checkpoints)}
    best = _best(story.run)
    events = story.facts.of("checkpoint", "save_failed")
    rows = []
    for event in reversed(events):
        step, failed = int(number(event.get("step")) or 0), event["event"] == "save_failed"
        size, write = number(event.get("bytes")), number(event.get("write_s"))
        note = "the best so far" if step == best else "on disk" if step in there else "removed"
        rows.append(
            {
                "step": f"{step:,}",
                "attempt": event["attempt"],
                "time": _clock(event["time"]),
                "after": span(max(0.0, event["time"] - story.begin)),
                "stall": seconds(number(event.get("stall_s"))),
                "write": seconds(write),
                "size": _bytes(size),
                "note": f"failed: {text_of(event, 'error')}" if failed else note,
                "kept": step in there and not failed,
                "failed": failed,
            }
        )
        there.discard(step)  # an older save of the same step was replaced
    done = [e for e in events if e["event"] == "checkpoint"]
    stalls = [number(e.get("stall_s")) or 0.0 for e in done]
    failed_count = len(events) - len(done)
    summary = f"{len(done):,} saved, {sum(row['kept'] for row in rows)} on disk"
    summary += f", {failed_count} failed" if failed_count else ""
    summary += f"; the training waited {span(sum(stalls))} for them in all" if done else ""
    return {"rows": rows[:MOST_ROWS], "summary": summary, "shown": 8} if rows else {}


def _best(run: RunFolder) -> int | None:
    for folder in checkpoints.published(run.checkpoints):
        try:
            best = checkpoints.read_manifest(folder).get("best")
            return int(best["step"]) if best else None
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _preflights(facts: Facts) -> list[dict[str, Any]]:
    """Return the tables of the newest preflight, and of those that found something bad."""
    events = [e for e in facts.of("preflight") if isinstance(e.get("report"), dict)]
    shown = [e for e in events if not e.get("ok") or e is events[-1]]
    found = []
    for event in shown[-5:]:
        try:
            rows = report_preflight.rows(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        bad = [row for row in rows if row[-1] != "good"]
        shown_rows = [*bad, *(row for row in rows if row not in bad)][: max(8, len(bad))]
        found.append(
            {
                "attempt": event["attempt"],
                "ok": bool(event.get("ok")),
                "why": text_of(event, "why"),
                "seconds": seconds(number(event.get("seconds"))),
                "header": report_preflight.COLUMNS,
                "rows": shown_rows[:MOST_ROWS],
                "more": len(rows) - len(shown_rows),
            }
        )
    return found


# --- the end, and what was asked for -------------------------------------------------------


def _end(story: _Story) -> dict[str, Any]:
    """Return what failed in the newest attempt: who, with what words, and its traceback."""
    facts = story.facts
    told = facts.of("failed", attempt=facts.newest)
    failure = facts.failure
    if failure is None and not told:
        return {}
    first = told[0] if told else {}
    own = next((e for e in told if failure and e.get("rank") == failure.rank), first)
    return {
        "rank": failure.rank if failure else first.get("rank"),
        "node": failure.node if failure else text_of(first, "node"),
        "error": (failure.error if failure else "") or text_of(own, "error"),
        "traceback": _clean(text_of(own, "traceback")),
        "log": _clean(facts.rank_log[-_TEXT_BYTES // 4 :]),
        "attempt": facts.newest,
    }


def _settings(story: _Story) -> list[tuple[str, str]]:
    """Return what was asked for and where it ran, as names and values."""
    spec = story.facts.spec
    found = [("command", _command(spec))] if spec else []
    found += [(name, text) for name, text in _given(spec).items() if name != "script"]
    script = _read(story.run.script)
    versions = re.search(r"Written by (hpc-ddp [\w.+-]*\w)", script)
    if versions:
        found.append(("version", versions[1]))
    torches = {
        str(node.get("torch"))
        for e in story.facts.of("preflight")
        for node in (e["report"].values() if isinstance(e.get("report"), dict) else ())
        if isinstance(node, dict) and node.get("torch")
    }
    if torches:
        found.append(("torch", ", ".join(sorted(torches))))
    hosts = sorted({n for e in _own(story) for n in _nodes_of([e])}, key=_natural)
    if hosts:
        found.append(("hosts", ", ".join(hosts)))
    found.append(("run folder", str(story.run.path)))
    return found


def _command(spec: Mapping[str, Any]) -> str:
    args = spec.get("args")
    words = [str(spec.get("script", "")), *map(str, args if isinstance(args, list) else ())]
    return shlex.join(words)


def _given(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that are not what they are by themselves, as text."""
    usual = {f.name: f.default for f in fields(JobSpec) if f.default is not MISSING}
    found = {}
    for name, value in spec.items():
        if name in ("name", "args") or value in (None, [], {}, False, ""):
            continue
        if usual.get(name, MISSING) == value and name != "nodes":
            continue
        found[name.replace("_", "-")] = _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}={_text(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _texts(story: _Story) -> list[tuple[str, str]]:
    """Return the texts that can be unfolded: what it printed last, and the scripts."""
    run, found = story.run, []
    try:
        logs = log_files(run, None, None)
    except HpcDdpError:
        logs = []
    if logs:
        lines = read_tail(logs[-1], _TEXT_BYTES).splitlines()
        found.append(("What it printed last", _clean("\n".join(lines[-80:]))))
    found.append(("job.sbatch", _read(run.script)))
    source = Path(str(story.facts.spec.get("script", "")))
    workdir = Path(str(story.facts.spec.get("workdir", ".")))
    whole = RunFolder(run.whole)
    for code in sorted(whole.code.glob("*"), key=lambda path: _natural(path.name))[-1:]:
        inside = source.relative_to(workdir) if source.is_relative_to(workdir) else source
        if not inside.is_absolute():
            found.append((f"{source.name}, as it ran", _read(code / inside)))
    return [(name, text) for name, text in found if text.strip()]


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            text = file.read(_TEXT_BYTES + 1)
    except OSError:
        return ""
    cut = "\n…" if len(text) > _TEXT_BYTES else ""
    return _clean(text[:_TEXT_BYTES].decode(errors="replace")) + cut


_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


def _clean(text: str) -> str:
    """Return a text without colours and other control characters."""
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


# --- several runs --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """A run of a comparison: its label in the charts, and its point of a sweep."""

    label: str
    story: _Story | None
    point: Mapping[str, str]
    state: str = "not begun"


def _letters(i: int) -> str:
    return chr(65 + i % 26) + (str(i // 26 + 1) if i >= 26 else "")


def _task_rows(
    run: RunFolder, tasks: Sequence[report_sweep.Task], jobs: Mapping[str, slurm.Queued]
) -> list[_Row]:
    return [
        _Row(str(t.index), _story(run.task(t.index), jobs) if t.status else None, t.point, t.state)
        for t in tasks
    ]


def _sweep_title(run: RunFolder, tasks: Sequence[report_sweep.Task]) -> dict[str, Any]:
    about = report_sweep.summary(run, tasks)
    return {"title": run.name, "about": f"{run.id}: {about}.", "path": str(run.path)}


def _comparison(rows: Sequence[_Row], title: Mapping[str, Any], templates: Path) -> str:
    begun = [row for row in rows if row.story and row.story.curves]
    drawn = begun
    if len(begun) > MOST_CURVES:
        chosen = sorted(begun, key=_final_loss)[:MOST_CURVES]
        drawn = [row for row in begun if row in chosen]
    hues = {row.label: i for i, row in enumerate(drawn)}
    names = list(dict.fromkeys(n for row in drawn if row.story for n in row.story.curves))
    names.sort(key=lambda name: (name != "loss", name == "samples_per_s"))
    told = [(row.label, dict(row.story.curves)) for row in drawn if row.story]
    return _filled(
        templates,
        page="compare",
        rows=[_result(row, hues.get(row.label)) for row in rows[:500]],
        columns=_columns(rows),
        differ=_differences(rows),
        charts=charts(names[:MOST_METRICS], told),
        left_out=names[MOST_METRICS:],
        few=f"Drawn are {len(drawn)} of {len(begun)}, those with the lowest loss at the end."
        if len(drawn) < len(begun)
        else "",
        **{"path": "", **title},
    )


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _final_loss(row: _Row) -> float:
    loss = row.story.curves.get("loss") if row.story else None
    return loss.last if loss and loss.last < math.inf else math.inf


def _result_names(rows: Sequence[_Row]) -> list[str]:
    return list(dict.fromkeys(n for row in rows if row.story for n in row.story.status.results))


def _columns(rows: Sequence[_Row]) -> dict[str, list[str]]:
    point = list(rows[0].point) if rows else []
    return {"point": point, "results": _result_names(rows)}


def _result(row: _Row, hue: int | None) -> dict[str, Any]:
    """Return a run's line of the table of results."""
    story = row.story
    told: dict[str, Any] = {"label": row.label, "hue": hue, "point": row.point, "story": story}
    if story is None:
        return {**told, "state": row.state, "sign": "○", "look": "calm"}
    head, status = _head(story), story.status
    speed = story.curves.get("samples_per_s")
    loss = story.curves.get("loss")
    return {
        **told,
        **{name: head[name] for name in ("name", "id", "sign", "look", "text")},
        "state": row.state if row.point else head["state"],
        "attempts": len({e["attempt"] for e in _own(story)}),
        "step": _count(number(status.step)),
        "loss": short(loss.last) if loss else "–",
        "results": {name: short(number(value)) for name, value in status.results.items()},
        "goodput": "–" if status.goodput is None else f"{status.goodput:.0%}",
        "speed": short(float(f"{median(speed.finite):.4g}")) if speed and speed.finite else "–",
        "wall": span(story.wall_s),
    }


def _differences(rows: Sequence[_Row]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ: name, and the value of each run."""
    told = [_all_settings(row.story.facts.spec) for row in rows if row.story]
    names = dict.fromkeys(name for each in told for name in each)
    usual = {
        f.name.replace("_", "-"): _text(f.default)
        for f in fields(JobSpec)
        if f.default is not MISSING and f.default not in (None, "", ())
    }
    found = [(name, [each.get(name, usual.get(name, "–")) for each in told]) for name in names]
    return [(name, values) for name, values in found if len(set(values)) > 1]


def _all_settings(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings and the script's own arguments, each under its name."""
    found = {name: text for name, text in _given(spec).items() if name not in ("env", "array")}
    env = spec.get("env")
    found |= {name: str(v) for name, v in (env if isinstance(env, dict) else {}).items()}
    args = spec.get("args")
    words = [str(word) for word in (args if isinstance(args, list) else ())]
    plain: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            plain.append(word)
            continue
        name, is_told, value = word.partition("=")
        if not is_told and words and not words[0].startswith("--"):
            value = words.pop(0)
        found[name] = value or "yes"
    return found | ({"arguments": shlex.join(plain)} if plain else {})


# --- amounts as text -----------------------------------------------------------------------


def span(value: float) -> str:
    """Return a time span in its two biggest units."""
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 119.5:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"


def seconds(value: float | None) -> str:
    """Return a short time in seconds or milliseconds."""
    if value is None:
        return "–"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _bytes(value: float | None) -> str:
    if value is None:
        return "–"
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    size, unit = next(((s, u) for s, u in units if value >= s), (1.0, "B"))
    return f"{value / size:.3g} {unit}"


def _clock(when: float) -> str:
    try:
        return time.strftime("%a %d %b %H:%M:%S", time.localtime(when))
    except (OverflowError, ValueError, OSError):
        return "–"


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} nodes"
