"""A run, or several side by side, as one HTML page that needs nothing else.

What is told comes from the journal, `explain` and `status`; what is drawn from
`hpc_ddp.report.charts`; how it looks is ``templates/report.html.j2``.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from hpc_ddp import __version__
from hpc_ddp.report import comparison as report_comparison
from hpc_ddp.report import preflight as report_preflight
from hpc_ddp.report.charts import charts, short
from hpc_ddp.report.curves import number, starts_of
from hpc_ddp.report.evidence import Facts, text_of
from hpc_ddp.report.logs import log_files
from hpc_ddp.report.status import queue
from hpc_ddp.report.story import (
    Story,
    brief,
    clean,
    clock,
    count,
    head_of,
    natural,
    nodes_of,
    numbers_in,
    read_story,
    settings_of,
    size,
    span,
    spec_of,
)
from hpc_ddp.report.timeline import attempts_of, timeline
from hpc_ddp.run import checkpoints, goodput
from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.folder import RunFolder, read_tail
from hpc_ddp.run.journal import node_seconds

MOST_METRICS = 24
MOST_ROWS = 200  # of a table
_TEXT_BYTES = 48 * 1024  # of a script or log


def report(run: RunFolder, templates: Path) -> str:
    """Return a run's page; an array's compares its tasks. `templates` is the folder of these."""
    if tasks := report_comparison.of_sweep(run):
        return _filled(templates, page="compare", **tasks)
    story = read_story(run, queue())
    return _filled(templates, page="run", title=run.name, **_told(story))


def comparison(runs: Sequence[RunFolder], templates: Path) -> str:
    """Return a page with several runs side by side."""
    return _filled(templates, page="compare", **report_comparison.of_runs(runs))


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


def _told(story: Story) -> dict[str, Any]:
    """Return all that the page of one run shows."""
    attempts = attempts_of(story)
    causes = {row["number"]: row["ended"] for row in attempts}
    names = list(story.curves)[:MOST_METRICS]
    starts = starts_of(story.facts.events, story.begin)
    return {
        "head": head_of(story),
        "tiles": _tiles(story),
        "bar": _bar(story.seconds),
        "timeline": timeline(story),
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


def _tiles(story: Story) -> list[tuple[str, str, str]]:
    """Return the figures at the top: what, how much, and what is worth adding."""
    status, curves = story.status, story.curves
    tiles: list[tuple[str, str, str]] = []
    if (step := number(status.step)) is not None:
        total = number(status.total_steps)
        tiles.append(("step", count(step), f"of {count(total)}" if total else ""))
    if loss := curves.get("loss"):
        least = min(
            (loss.values[i] for i in loss.kept() if loss.values[i] < math.inf), default=None
        )
        tiles.append(("loss", short(loss.last), f"lowest {short(least)}"))
    for name, value in status.results.items():
        tiles.append((name, short(number(value)), "result"))
    if story.goodput != "–":
        tiles.append(("goodput", story.goodput, "queue excluded"))
    if story.attempts:
        first = next((e for e in story.events if e["event"] == "first_step"), {})
        world = number(first.get("world_size"))
        tiles.append(("attempts", str(len(story.attempts)), f"{world:.0f} ranks" if world else ""))
        queued = story.seconds["queued"]
        tiles.append(("wall time", span(story.wall_s), f"{span(queued)} queued"))
    if (speed := curves.get("samples_per_s")) and speed.finite:
        tiles.append(("samples/s", short(float(f"{median(speed.finite):.4g}")), "median"))
    spec = spec_of(story.run)
    hours = node_seconds(story.events, story.end) * spec.gpus_in_use / 3600 if spec else 0.0
    if spec and hours:
        what = "GPU hours" if spec.gpu_count else "worker hours"
        tiles.append((what, short(float(f"{hours:.3g}")), ""))
    return tiles


def _bar(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the parts of the wall time that are not zero, with their shares in percent."""
    wall = sum(seconds.values())
    return [
        {"part": part, "time": span(value), "share": 100 * value / wall}
        for part, value in seconds.items()
        if wall > 0 and value >= 0.05
    ]


def _ranks(facts: Facts) -> dict[str, Any]:
    """Return each rank's own time per step in the newest attempt that told of it, slowest first."""
    told = facts.of("ranks")
    told = [e for e in told if e["attempt"] == told[-1]["attempt"]]
    name = "busy_s" if any(numbers_in(e.get("busy_s")) for e in told) else "data_s"
    lists = [numbers_in(e.get(name)) for e in told]
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


def _saves(story: Story) -> dict[str, Any]:
    """Return what is known of the checkpoints, newest first, and in sum."""
    there = {checkpoints.step_of(path) for path in checkpoints.published(story.run.checkpoints)}
    best = _best(story.run)
    events = story.facts.of("checkpoint", "save_failed")
    rows = []
    for event in reversed(events):
        step, failed = int(number(event.get("step")) or 0), event["event"] == "save_failed"
        write = number(event.get("write_s"))
        note = "the best so far" if step == best else "on disk" if step in there else "removed"
        rows.append(
            {
                "step": f"{step:,}",
                "attempt": event["attempt"],
                "time": clock(event["time"]),
                "after": span(max(0.0, event["time"] - story.begin)),
                "stall": brief(number(event.get("stall_s"))),
                "write": brief(write),
                "size": size(number(event.get("bytes"))),
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
                "seconds": brief(number(event.get("seconds"))),
                "header": report_preflight.COLUMNS,
                "rows": shown_rows[:MOST_ROWS],
                "more": len(rows) - len(shown_rows),
            }
        )
    return found


def _end(story: Story) -> dict[str, Any]:
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
        "traceback": clean(text_of(own, "traceback")),
        "log": clean(facts.rank_log[-_TEXT_BYTES // 4 :]),
        "attempt": facts.newest,
    }


def _settings(story: Story) -> list[tuple[str, str]]:
    """Return what was asked for and where it ran, as names and values."""
    spec = story.facts.spec
    found = [("command", _command(spec))] if spec else []
    found += [(name, text) for name, text in settings_of(spec).items() if name != "script"]
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
    hosts = sorted({n for each in story.attempts.values() for n in nodes_of(each)}, key=natural)
    if hosts:
        found.append(("hosts", ", ".join(hosts)))
    found.append(("run folder", str(story.run.path)))
    return found


def _command(spec: Mapping[str, Any]) -> str:
    args = spec.get("args")
    words = [str(spec.get("script", "")), *map(str, args if isinstance(args, list) else ())]
    return shlex.join(words)


def _texts(story: Story) -> list[tuple[str, str]]:
    """Return the texts that can be unfolded: what it printed last, and the scripts."""
    run, found = story.run, []
    try:
        logs = log_files(run, None, None)
    except HpcDdpError:
        logs = []
    if logs:
        lines = read_tail(logs[-1], _TEXT_BYTES).splitlines()
        found.append(("What it printed last", clean("\n".join(lines[-80:]))))
    found.append(("job.sbatch", _read(run.script)))
    source = Path(str(story.facts.spec.get("script", "")))
    workdir = Path(str(story.facts.spec.get("workdir", ".")))
    whole = RunFolder(run.whole)
    for code in sorted(whole.code.glob("*"), key=lambda path: natural(path.name))[-1:]:
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
    return clean(text[:_TEXT_BYTES].decode(errors="replace")) + cut
