"""The table of runs: their selection, their order, and the columns that fit a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from hpc_ddp import slurm
from hpc_ddp.core.console.progress import ProgressBar
from hpc_ddp.core.console.terminal import one_line
from hpc_ddp.core.console.units import duration
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.trackers import sync_commands
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import all_runs, find_run, linked_runs
from hpc_ddp.live_jobs import Queue, read_queue
from hpc_ddp.report.status import array_tasks
from hpc_ddp.report.status.cache import StatusCache
from hpc_ddp.report.status.run_status import Status, unreadable

MOST_RUNS = 20  # shown without --all, unless more of them are live
WIDEST_CELL = 64  # characters, but of "why": one run of a shared folder must not widen all rows
MIN_WHY_WIDTH = 24  # other columns are dropped before "why" gets narrower than this

# fmt: off
COLUMNS = (
    "name", "id", "job", "state", "attempt", "nodes", "step", "loss", "samples/s", "saved",
    "goodput", "left", "why",
)
# fmt: on
# On a narrow terminal these are dropped, the first one first.
_DROP_ORDER = ("samples/s", "nodes", "attempt", "goodput", "saved", "loss", "id", "job", "left")
_SHOWN_WHEN_EMPTY = ("name", "id", "job", "state", "step", "loss", "saved", "why")
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


def show(root: Path, names: Sequence[str], show_all: bool, as_json: bool) -> str:
    """Return the states of runs as a table, or with `as_json` as a JSON list. The runs are those of
    `names` (each as `find_run` reads it), or without names all below `root`.

    Slurm is asked; without an answer the states are those of the journals. Without names, live runs
    come first, and the table has only `MOST_RUNS` and the live ones, with the number of the others,
    unless `show_all`; JSON has all. With a single name the tasks of its array are added, and to a
    table the commands that send what was recorded offline. Without any run the table is '', and a
    hint goes to stderr. The statuses of ended runs are kept in a file in `root` (`StatusCache`).

    Raises
    ------
    UsageError
        no run, or no single one, has one of the names
    OSError
        the folder of the runs, or the journal of a run of these names, can't be read
    """
    queue = read_queue()
    older = 0
    if names:
        runs = [find_run(root, name, slurm.own_cluster) for name in names]
    else:
        runs, older = select(root, queue, show_all or as_json)
    with ProgressBar("reading journals", len(runs)) as progress:
        rows = read_statuses(root, runs, queue, partial(progress.add, 1))
    if not names:
        rows = live_first(rows)
    tasks: list[array_tasks.Task] = []
    if len(names) == 1:
        with suppress(Exception):  # the run's own row names the damage, which has many forms
            tasks = array_tasks.tasks(runs[0], queue)
    if as_json:
        dicts = [row.to_dict() for row in rows]
        if tasks:
            dicts[0]["tasks"] = [task.to_dict() for task in tasks]
        return json.dumps(dicts)
    if not rows:
        hint = "elsewhere: cd to where they were submitted, --runs-dir, or HPC_DDP_RUNS"
        print(f"no runs in {root}\nhint: {hint}", file=sys.stderr)  # stdout is data
        return ""
    parts = [table(rows, *terminal())]
    if older:
        parts[0] += f"\n… {older:,} older: hpc-ddp status --all"
    if tasks:
        parts += _task_parts(runs[0], tasks)
    if len(names) == 1 and (commands := _sync_commands(runs[0])):
        parts.append("\n".join(["recorded offline; to send it:", *commands]))
    return "\n\n".join(parts)


def local_trials(run: RunFolder) -> str:
    """Return the table of the trials of a sweep that is played on this machine, the best one first,
    with the lines that `show` adds; Slurm is not asked. Raise UsageError for a broken job.json, and
    OSError where the folder can't be read."""
    return "\n\n".join(_task_parts(run, array_tasks.tasks(run, Queue(None))))


def _task_parts(run: RunFolder, tasks: Sequence[array_tasks.Task]) -> list[str]:
    """Return the parts of the text on an array, whose `tasks` are one or more: their table, in the
    order of a sweep's ranking, their summary, and the best trial. Raises as
    `array_tasks.summary`."""
    ranking = array_tasks.rank(tasks)
    parts = [array_tasks.table(ranking.tasks if ranking else tasks)]
    parts.append(array_tasks.summary(run, tasks))
    return [*parts, ranking.text(run)] if ranking else parts


def _sync_commands(run: RunFolder) -> list[str]:
    """Return the commands that send what a run has recorded offline (`sync_commands`); [] where a
    folder can't be read, as another user's."""
    try:
        return sync_commands(run)
    except OSError:
        return []


def select(root: Path, queue: Queue, show_all: bool) -> tuple[list[RunFolder], int]:
    """Return the `MOST_RUNS` newest runs below `root`, and older ones with a live job, newest
    first; and how many others there are. With `show_all` return all, and 0. `queue` has the user's
    jobs."""
    runs = all_runs(root)
    if show_all or len(runs) <= MOST_RUNS:
        return runs, 0
    clusters = (queue.cluster, JobRef("", queue.cluster).cluster_name, "")
    live = linked_runs(root, (JobRef(id, cluster) for id in queue.live for cluster in clusters))
    selection = runs[:MOST_RUNS]
    selection += [run for run in runs[MOST_RUNS:] if str(run.path.resolve()) in live]
    return selection, len(runs) - len(selection)


def live_first(rows: Sequence[Status]) -> list[Status]:
    """Return the rows, those of live runs before the others."""
    return sorted(rows, key=lambda row: not row.state.is_live)


def read_statuses(
    root: Path,
    runs: Sequence[RunFolder],
    queue: Queue,
    count_run: Callable[[], None] = lambda: None,
) -> list[Status]:
    """Return the status of each run, in their order; that of a run that can't be read is
    `unreadable`. No error of a run is raised.

    `count_run` is called after each run. The cache in `root` is read and written.
    """
    cache = StatusCache(root, queue)
    statuses = []
    for run in runs:
        statuses.append(_read_status(cache, run))
        count_run()
    cache.save()
    return statuses


def _read_status(cache: StatusCache, run: RunFolder) -> Status:
    """Return a run's status, after any error the `unreadable` one: one run must not hide the
    others."""
    try:
        return cache.status_of(run)
    except Exception as error:  # damage has many forms
        return unreadable(run, f"{type(error).__name__}: {error}")


def table(rows: Sequence[Status], width: int | None = None, colours: bool = False) -> str:
    """Return the rows, one or more, as a table; most columns are left out where they are empty.
    Raise TypeError without rows.

    Parameters
    ----------
    width
        of the terminal, in characters: columns are dropped until the others fit, and ``why`` is
        cut; None: no limit
    colours
        of the states, as terminal codes
    """
    cells = [_cells(row) for row in rows]
    names = [
        name
        for name in COLUMNS
        if name in _SHOWN_WHEN_EMPTY or any(row[name] not in ("-", "") for row in cells)
    ]
    widths = {name: max(len(name), *(len(row[name]) for row in cells)) for name in names}

    def why_width() -> int:
        """Return the width that the other columns leave to the last one, `why`."""
        return (width or 10**6) - sum(widths[name] + 2 for name in names[:-1])

    for name in _DROP_ORDER:
        if name in names and why_width() < min(widths["why"], MIN_WHY_WIDTH):
            names.remove(name)
    lines = []
    for row in [{name: name for name in names}, *cells]:
        shown = {name: row[name].ljust(widths[name]) for name in names}
        shown["why"] = _cut(row["why"], why_width())
        code = COLOURS.get(row["state"]) if colours else None
        if code:
            shown["state"] = f"\033[{code}m{shown['state']}\033[0m"
        lines.append("  ".join(shown.values()).rstrip())
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    """Return a text in at most `width` characters, with … where it is cut, also for a width below
    1."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def _cells(row: Status) -> dict[str, str]:
    """Return the cells of a run's row by column, without control characters and cut to
    `WIDEST_CELL`; an unknown one is ``-``. ``why`` is whole, and '' where nothing is known."""
    age = None if row.last_checkpoint_s is None else f"{duration(row.last_checkpoint_s)} ago"
    cells = {
        "name": row.name,
        "id": row.id,
        "job": row.job_id,
        "state": row.state,
        "attempt": row.attempt,
        "nodes": row.nodes,
        "step": row.progress,
        "loss": None if row.loss is None else f"{row.loss:.4g}",
        "samples/s": None if row.samples_per_s is None else f"{row.samples_per_s:.4g}",
        "saved": age,
        "goodput": None if row.goodput is None else f"{row.goodput:.0%}",
        "left": _time_left(row),
        "why": "; ".join(filter(None, (row.slow, row.why))),
    }
    texts = {name: "-" if cell is None else one_line(str(cell)) for name, cell in cells.items()}
    return {n: text if n == "why" else _cut(text, WIDEST_CELL) for n, text in texts.items()}


def _time_left(row: Status) -> str | None:
    """Return the time to the last step, and to the time limit if that comes before it; None where
    both are unknown."""
    limit_s = row.time_left_s
    if row.eta_s is None:
        return None if limit_s is None else f"limit {duration(limit_s)}"
    if limit_s is not None and limit_s < row.eta_s:
        return f"{duration(row.eta_s)}, limit {duration(limit_s)}"
    return duration(row.eta_s)


def terminal() -> tuple[int | None, bool]:
    """Return the terminal's width in characters (None: stdout is no terminal), and whether it takes
    colours."""
    if not sys.stdout.isatty():
        return None, False
    return shutil.get_terminal_size().columns, "NO_COLOR" not in os.environ
