"""The page of a run: the values that ``templates/report.html.j2`` shows."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import jinja2

from hpc_ddp import __version__
from hpc_ddp.core.console.units import duration, measured
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal import goodput
from hpc_ddp.core.journal.events import RankFailed
from hpc_ddp.core.journal.fields import to_number
from hpc_ddp.core.journal.journal import node_seconds
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.html.charts import make_charts
from hpc_ddp.report.html.curves import Curve, curves_of, starts_of
from hpc_ddp.report.html.history import RunHistory, attempt_rows, make_strip, nodes_of, read_run
from hpc_ddp.report.status.run_state import RunState, spec_of

MOST_CHARTS = 24
MOST_ATTEMPTS = 200
_LOG_CHARACTERS = 12_000
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
# The sign beside a state, and the class of its colour.
_LOOKS = {
    RunState.FINISHED: ("✓", "good"),
    RunState.WAITING: ("…", "calm"),
    RunState.RENDERED: ("○", "calm"),
    RunState.STOPPED: ("⏸", "warn"),
    RunState.CANCELLED: ("⏹", "warn"),
}
_WORKING, _BAD = ("▶", "busy"), ("✕", "bad")


def render_page(run: RunFolder, templates: Path) -> str:
    """Read a run, query Slurm, and return the run's page as HTML; `templates` is the folder of the
    template. Without a job.json that can be read the page lacks GPU hours and settings.

    Raises
    ------
    UsageError
        the run is an array or a sweep, whose tasks have a page each
    OSError
        the run's journal, or the template, can't be read
    """
    spec = spec_of(run)
    if spec and spec.array and not run.is_task:
        raise UsageError(
            f"run {run.path} is an array; accepted: one of its tasks",
            hint=f"hpc-ddp report {run.task(0).quoted}; of all tasks: hpc-ddp status {run.quoted}",
        )
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime())
    template = env.get_template("report.html.j2")
    return template.render(version=__version__, written=written, **_sections(read_run(run), spec))


def _sections(history: RunHistory, spec: JobSpec | None) -> dict[str, Any]:
    """Return the values of the template, by name, with charts of the first `MOST_CHARTS` metrics,
    and the last `MOST_ATTEMPTS` attempts. `spec` is the job (None: not known; GPU hours are left
    out)."""
    rows = attempt_rows(history)
    curves = curves_of(history.facts.events)
    ends = {row["number"]: row["end"] for row in rows}
    starts = starts_of(history.facts.events)
    state = history.status.state
    sign, look = _LOOKS.get(state, _WORKING if state.is_working else _BAD)
    return {
        "run": history.run,
        "status": history.status,
        "explanation": history.explanation,
        "sign": sign,
        "look": look,
        "tiles": _tiles(history, spec, curves),
        "failure": _failure(history),
        "charts": make_charts(list(curves.values())[:MOST_CHARTS], starts, ends),
        "left_out": list(curves)[MOST_CHARTS:],
        "strip": make_strip(history, rows),
        "parts": _parts(history.seconds),
        "attempts": rows[-MOST_ATTEMPTS:],
        "settings": _settings(history),
    }


def _tiles(
    history: RunHistory, spec: JobSpec | None, curves: Mapping[str, Curve]
) -> list[tuple[str, str, str]]:
    """Return the figures at the top of the page, each as three texts: name, figure, and an addition
    to the figure ('' without one). Unknown figures are left out; but a result that is no number,
    and the lowest loss where none is finite, are ``–``. Without `spec` (None) GPU hours are left
    out."""
    status, tiles = history.status, []
    if status.step is not None:
        total = f"of {status.total_steps:,}" if status.total_steps else ""
        tiles.append(("step", f"{status.step:,}", total))
    if loss := curves.get("loss"):
        lowest = measured(min(loss.finite, default=None))
        tiles.append(("loss", measured(loss.points[-1].number), f"lowest {lowest}"))
    for name, result in status.results.items():
        tiles.append((name, measured(to_number(result)), "result"))
    share = goodput.share(history.seconds)
    if share is not None:
        tiles.append(("goodput", f"{share:.0%}", "queue excluded"))
    if history.attempts:
        wall_s = sum(history.seconds.values())
        tiles.append(("attempts", str(len(history.attempts)), ""))
        queued = f"{duration(history.seconds['queued'])} queued"
        tiles.append(("wall time", duration(wall_s), queued))
    if spec and history.attempts:
        node_s = node_seconds(history.facts.events, history.end)
        unit = "GPU hours" if spec.gpu_count else "worker hours"
        tiles.append((unit, f"{spec.gpus_in_use * node_s / 3600:.3g}", ""))
    return tiles


def _failure(history: RunHistory) -> dict[str, Any]:
    """Return the failure that ended the newest attempt, by name: rank, node, error, traceback, log,
    and the attempt's number; {} without a failure. An unknown entry is '' or None.

    Where the failed rank has journaled no failure, another rank's error and traceback stand for it.
    """
    facts, failure = history.facts, history.facts.failure
    if failure is None:
        return {}
    events = facts.select(RankFailed, attempt=facts.newest)
    events.sort(key=lambda event: event.rank != failure.rank)  # the failed rank's come first
    return {
        "rank": failure.rank,
        "node": failure.node,
        "error": failure.error or (events[0].error if events else ""),
        "traceback": _strip_controls(events[0].traceback if events else ""),
        "log": _strip_controls(facts.rank_log[-_LOG_CHARACTERS:]),
        "attempt": facts.newest,
    }


def _parts(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row for each part of the wall time of 0.05 s or more: its ``name``, its ``time`` and
    ``share`` as text, and its ``meaning``; [] without wall time. `seconds` is the wall time by
    part."""
    wall_s = sum(seconds.values())
    return [
        {
            "name": part,
            "time": duration(spent_s),
            "share": f"{100 * spent_s / wall_s:.1f} %",
            "meaning": goodput.PARTS[part].replace("`", ""),
        }
        for part, spent_s in seconds.items()
        if wall_s > 0 and spent_s >= 0.05
    ]


def _settings(history: RunHistory) -> list[tuple[str, str]]:
    """Return the rows of the page's settings, (name, text) each: the command, the job's settings
    that are not the defaults (``nodes`` always), the hosts, and the run's folder. Without a
    job.json the first two are left out, and the hosts where no node is known."""
    spec = history.facts.spec
    defaults = {f.name: f.default for f in fields(JobSpec) if f.default is not MISSING}
    settings = []
    if spec:
        args = spec.get("args")
        words = [str(spec.get("script", "")), *map(str, args if isinstance(args, list) else ())]
        settings.append(("command", shlex.join(words)))
    for name, setting in spec.items():
        is_default = defaults.get(name, MISSING) == setting and name != "nodes"
        is_empty = setting in (None, "", [], {})
        if name not in ("name", "args", "script") and not (is_empty or is_default):
            settings.append((name.replace("_", "-"), _as_text(setting)))
    hosts = dict.fromkeys(n for events in history.attempts.values() for n in nodes_of(events))
    if hosts:
        settings.append(("hosts", ", ".join(hosts)))
    return [*settings, ("run folder", str(history.run.path))]


def _as_text(setting: Any) -> str:
    """Return the value of a setting as text: each entry of a table (``NAME=TEXT``) or list on a
    line of its own, and ``yes`` or ``no`` for a flag."""
    if isinstance(setting, dict):
        return "\n".join(f"{name}={_as_text(entry)}" for name, entry in setting.items())
    if isinstance(setting, list):
        return "\n".join(map(str, setting))
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    return str(setting)


def _strip_controls(text: str) -> str:
    """Return a text without colours, other control characters and surrogates, which stand for bytes
    that are no UTF-8; tabs and line breaks stay, and a carriage return becomes a line break."""
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
