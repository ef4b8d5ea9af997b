"""Several runs, or the tasks of a sweep, side by side."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from statistics import median
from typing import Any

from hpc_ddp.report import sweep
from hpc_ddp.report.charts import charts, short
from hpc_ddp.report.curves import number
from hpc_ddp.report.status import queue
from hpc_ddp.report.story import (
    Story,
    as_text,
    count,
    head_of,
    read_story,
    settings_of,
    span,
    spec_of,
)
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.spec import JobSpec

MOST_CURVES = 12  # in one chart
MOST_METRICS = 24
MOST_ROWS = 500


@dataclass(frozen=True)
class Row:
    """A run of a comparison: its label in the charts, and its point of a sweep."""

    label: str
    story: Story | None
    point: Mapping[str, str]
    state: str = "not begun"


def of_runs(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return what a page of several runs shows."""
    jobs = queue()
    rows = [Row(_letters(i), read_story(run, jobs), {}) for i, run in enumerate(runs)]
    names = list(dict.fromkeys(run.name for run in runs))
    about = f"{len(runs)} runs side by side."
    return _compared(rows, title=" and ".join(names[:3]), about=about, path="")


def of_sweep(run: RunFolder) -> dict[str, Any]:
    """Return what the page of an array's tasks shows; nothing for a run that is no array."""
    jobs = queue()
    tasks = sweep.tasks(run, jobs) if spec_of(run) else []
    if not tasks:
        return {}
    rows = [
        Row(
            str(t.index),
            read_story(run.task(t.index), jobs) if t.status else None,
            t.point,
            t.state,
        )
        for t in tasks
    ]
    about = f"{run.id}: {sweep.summary(run, tasks)}."
    return _compared(rows, title=run.name, about=about, path=str(run.path))


def _letters(i: int) -> str:
    return chr(65 + i % 26) + (str(i // 26 + 1) if i >= 26 else "")


def _compared(rows: Sequence[Row], **told: Any) -> dict[str, Any]:
    begun = [row for row in rows if row.story and row.story.curves]
    chosen = sorted(begun, key=_final_loss)[:MOST_CURVES]
    drawn = [row for row in begun if row in chosen]
    hues = {row.label: i for i, row in enumerate(drawn)}
    names = list(dict.fromkeys(n for row in drawn if row.story for n in row.story.curves))
    names.sort(key=lambda name: (name != "loss", name == "samples_per_s"))
    if len(drawn) < len(begun):
        best = f"Drawn are {len(drawn)} of {len(begun)}, those with the lowest loss at the end."
        told["about"] += f" {best}"
    curves = [(row.label, dict(row.story.curves)) for row in drawn if row.story]
    return {
        **told,
        "rows": [_result(row, hues.get(row.label)) for row in rows[:MOST_ROWS]],
        "columns": _columns(rows),
        "differ": _differences(rows),
        "charts": charts(names[:MOST_METRICS], curves),
        "left_out": names[MOST_METRICS:],
    }


def _final_loss(row: Row) -> float:
    loss = row.story.curves.get("loss") if row.story else None
    return loss.last if loss and loss.last < math.inf else math.inf


def _result_names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(n for row in rows if row.story for n in row.story.status.results))


def _columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    point = list(rows[0].point) if rows else []
    return {"point": point, "results": _result_names(rows)}


def _result(row: Row, hue: int | None) -> dict[str, Any]:
    """Return a run's line of the table of results."""
    story = row.story
    told: dict[str, Any] = {"label": row.label, "hue": hue, "point": row.point, "story": story}
    if story is None:
        return {**told, "state": row.state, "sign": "○", "look": "calm"}
    head, status = head_of(story), story.status
    speed = story.curves.get("samples_per_s")
    loss = story.curves.get("loss")
    return {
        **told,
        **{name: head[name] for name in ("name", "id", "sign", "look", "text")},
        "state": row.state if row.point else head["state"],
        "attempts": len(story.attempts),
        "step": count(number(status.step)),
        "loss": short(loss.last) if loss else "–",
        "results": {name: short(number(value)) for name, value in status.results.items()},
        "goodput": story.goodput,
        "speed": short(float(f"{median(speed.finite):.4g}")) if speed and speed.finite else "–",
        "wall": span(story.wall_s),
    }


def _differences(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ: name, and the value of each run."""
    told = [_all_settings(row.story.facts.spec) for row in rows if row.story]
    names = dict.fromkeys(name for each in told for name in each)
    usual = {
        f.name.replace("_", "-"): as_text(f.default)
        for f in fields(JobSpec)
        if f.default is not MISSING and f.default not in (None, "", ())
    }
    found = [(name, [each.get(name, usual.get(name, "–")) for each in told]) for name in names]
    return [(name, values) for name, values in found if len(set(values)) > 1]


def _all_settings(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings and the script's own arguments, each under its name."""
    found = {name: text for name, text in settings_of(spec).items() if name not in ("env", "array")}
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
