"""The table of runs: which are shown, in which order, and how they fit a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.report import sweep
from hpc_ddp.report.remembered import Remembered
from hpc_ddp.report.status import LIVE, Status, age, queue, unreadable
from hpc_ddp.run.folder import RunFolder, all_runs, find_run
from hpc_ddp.run.progress import Progress

SHOWN = 20  # runs, unless all are asked for, or more of them live

# Each column, and what is left out first on a narrow terminal (0: never).
COLUMNS = {
    "name": 0,
    "id": 4,
    "job": 3,
    "state": 0,
    "attempt": 8,
    "nodes": 9,
    "step": 0,
    "loss": 5,
    "samples/s": 10,
    "saved": 6,
    "goodput": 7,
    "left": 2,
    "why": 0,
}
COLOURS = {
    "running": "32",
    "finished": "2",
    "waiting": "33",
    "ending": "33",
    "starting": "33",
    "failed": "31",
    "lost": "31",
    "suspended": "35",
    "stopped": "36",
}


def show(root: Path, names: Sequence[str], every: bool, as_json: bool) -> str:
    """Return the states of the runs of these names, or of all, as a table or as JSON.

    Of all, those under way come first. JSON has all runs, whatever the table would leave out.
    """
    jobs = queue()
    others = 0
    if names:
        runs = [find_run(root, name) for name in names]
    else:
        runs, others = select(root, jobs, every or as_json)
    rows = look(root, runs, jobs)
    if not names:
        rows.sort(key=lambda row: row.state not in LIVE)
    tasks = sweep.tasks(runs[0], jobs) if len(names) == 1 else []
    if as_json:
        told = [row.to_dict() for row in rows]
        return json.dumps([told[0] | {"tasks": [t.to_dict() for t in tasks]}] if tasks else told)
    if not rows:
        hint = "elsewhere: cd to where they were submitted, --runs-dir, or HPC_DDP_RUNS"
        print(f"no runs in {root}\nhint: {hint}", file=sys.stderr)  # stdout is data
        return ""
    parts = [table(rows, *terminal())]
    if others:
        parts[0] += f"\n… {others:,} older: hpc-ddp status --all"
    if tasks:
        parts += [sweep.table(tasks), sweep.summary(runs[0], tasks)]
    return "\n\n".join(parts)


def select(
    root: Path, queue: Mapping[str, slurm.Queued], every: bool
) -> tuple[list[RunFolder], int]:
    """Return the runs to look at, newest first, and how many others there are.

    Of many, the newest, and those that Slurm has a job of.
    """
    runs = all_runs(root)
    if every or len(runs) <= SHOWN:
        return runs, 0
    jobs = [job for job, each in queue.items() if each.state in slurm.LIVE]
    live = {os.path.realpath(root / ".jobs" / job) for job in jobs}
    live |= {os.path.dirname(path) for path in live}  # of a task, its array
    shown = [run for at, run in enumerate(runs) if at < SHOWN or str(run.path.resolve()) in live]
    return shown, len(runs) - len(shown)


def look(root: Path, runs: Sequence[RunFolder], queue: Mapping[str, slurm.Queued]) -> list[Status]:
    """Return the states of runs, in their order."""
    known = Remembered(root, queue)
    found = []
    with Progress("reading journals", len(runs)) as progress:
        for run in runs:
            found.append(_of_one(known, run))
            progress.add(1)
    known.save()
    return found


def _of_one(known: Remembered, run: RunFolder) -> Status:
    """Return a run's state. One that can't be read must not hide the others."""
    try:
        return known.status_of(run)
    except Exception as error:  # damage has many forms
        return unreadable(run, f"{type(error).__name__}: {error}")


def table(rows: Sequence[Status], width: int | None = None, colours: bool = False) -> str:
    """Return the rows as a table for a person; columns that are empty are left out.

    Parameters
    ----------
    width
        of the terminal, in characters: what does not fit is left out, the least important first
    colours
        of the states, as codes of a terminal
    """
    cells = [{n: "-" if v is None else str(v) for n, v in _row(row).items()} for row in rows]
    names = [n for n in COLUMNS if n in _ALWAYS or any(row[n] not in ("-", "") for row in cells)]
    widths = {name: max(len(name), *(len(row[name]) for row in cells)) for name in names}

    def rest() -> int:
        """Return what the other columns leave to the last one, `why`."""
        return (width or 10**6) - sum(widths[name] + 2 for name in names[:-1])

    for name in sorted(names, key=lambda name: COLUMNS[name], reverse=True):
        if rest() < min(widths["why"], WHY) and COLUMNS[name]:
            names.remove(name)
    lines = []
    for row in [{name: name for name in names}, *cells]:
        shown = {name: row[name].ljust(widths[name]) for name in names}
        why = row["why"]
        shown["why"] = why if len(why) <= rest() else f"{why[: max(rest() - 1, 0)]}…"
        code = COLOURS.get(row["state"]) if colours else None
        if code:
            shown["state"] = f"\033[{code}m{shown['state']}\033[0m"
        lines.append("  ".join(shown.values()).rstrip())
    return "\n".join(lines)


_ALWAYS = ("name", "id", "job", "state", "step", "loss", "saved", "why")
WHY = 24  # of its characters are worth more than another column


def _row(row: Status) -> dict[str, Any]:
    return {
        "name": row.name,
        "id": row.id,
        "job": row.job_id,
        "state": row.state,
        "attempt": row.attempt,
        "nodes": row.nodes,
        "step": f"{row.step}/{row.total_steps}" if row.total_steps else row.step,
        "loss": None if row.loss is None else f"{row.loss:.4g}",
        "samples/s": None if row.samples_per_s is None else f"{row.samples_per_s:.4g}",
        "saved": None if row.last_checkpoint_s is None else f"{age(row.last_checkpoint_s)} ago",
        "goodput": None if row.goodput is None else f"{row.goodput:.0%}",
        "left": _left(row),
        "why": "; ".join(filter(None, (row.slow, row.why))),
    }


def _left(row: Status) -> str | None:
    """Return the time to the last step, or to the limit that comes before it."""
    if row.eta_s is None:
        return None if row.time_left_s is None else f"limit {age(row.time_left_s)}"
    if row.time_left_s is not None and row.time_left_s < row.eta_s:
        return f"{age(row.eta_s)}, limit {age(row.time_left_s)}"
    return age(row.eta_s)


def terminal() -> tuple[int | None, bool]:
    """Return the width of the terminal that stdout is, and whether it takes colours."""
    if not sys.stdout.isatty():
        return None, False
    return shutil.get_terminal_size().columns, "NO_COLOR" not in os.environ


def watch(render: Callable[[], str], every_s: float) -> None:
    """Show what `render` returns again and again, in place on a terminal, until Ctrl-C."""
    try:
        if not sys.stdout.isatty():
            while True:
                print(render(), flush=True)
                time.sleep(every_s)
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(highlight=False), auto_refresh=False, screen=False) as live:
            while True:
                live.update(Text.from_ansi(render(), no_wrap=True), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return
