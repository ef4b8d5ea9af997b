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
from hpc_ddp.report.status.run_status import Status, unreadable_status

MOST_RUNS = 20  # the newest runs, shown without --all; older live ones are added
# Characters in a cell other than "why": one run, in a folder that users share, must not widen all
# rows.
WIDEST_CELL = 64
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


def status_text(root: Path, names: Sequence[str], show_all: bool, as_json: bool) -> str:
    """Return the states of runs as a table, or with `as_json` as a JSON list. The runs are those of
    `names` (each as `find_run` reads it), or without names those below `root`.

    Slurm is asked; without an answer the states are those of the journals. Without names live runs
    come first; unless `show_all`, the table then has only the `MOST_RUNS` newest runs and older
    live ones, and the number of the others, while JSON has all. With a single name the tasks of its
    array are added, and to a table the commands that send what trackers recorded offline. Without
    any run the table is '', and a hint goes to stderr. The status of ended runs is kept in a file
    in `root` (`StatusCache`).

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
        runs, older = select_runs(root, queue, show_all or as_json)
    with ProgressBar("reading journals", len(runs)) as progress:
        rows = read_statuses(root, runs, queue, partial(progress.add, 1))
    if not names:
        rows = sort_live_first(rows)
    tasks: list[array_tasks.Task] = []
    if len(names) == 1:
        with suppress(Exception):  # of any kind, for a damaged run: its own row names the damage
            tasks = array_tasks.read_tasks(runs[0], queue)
    if as_json:
        dicts = [row.to_dict() for row in rows]
        if tasks:
            dicts[0]["tasks"] = [task.to_dict() for task in tasks]
        return json.dumps(dicts)
    if not rows:
        hint = "elsewhere: cd to where they were submitted, --runs-dir, or HPC_DDP_RUNS"
        print(f"no runs in {root}\nhint: {hint}", file=sys.stderr)  # stdout is data
        return ""
    parts = [runs_table(rows, *query_terminal())]
    if older:
        parts[0] += f"\n… {older:,} older: hpc-ddp status --all"
    if tasks:
        parts += _task_parts(runs[0], tasks)
    if len(names) == 1 and (commands := _sync_commands(runs[0])):
        parts.append("\n".join(["recorded offline; to send it:", *commands]))
    return "\n\n".join(parts)


def local_trials_text(run: RunFolder) -> str:
    """Return the text on the trials of a sweep that is played on this machine, as `status_text`
    adds it to a run: table, summary, best trial. Slurm is not asked. Raise UsageError for a broken
    job.json, and OSError where the folder can't be read."""
    return "\n\n".join(_task_parts(run, array_tasks.read_tasks(run, Queue(None))))


def _task_parts(run: RunFolder, tasks: Sequence[array_tasks.Task]) -> list[str]:
    """Return the parts of the text on an array with one or more `tasks`: their table, in the order
    of a sweep's ranking, their summary, and for a ranking the best trial. Raise as
    `array_tasks.summarize_tasks`."""
    ranking = array_tasks.rank_tasks(tasks)
    parts = [array_tasks.task_table(ranking.tasks if ranking else tasks)]
    parts.append(array_tasks.summarize_tasks(run, tasks))
    return [*parts, ranking.text(run)] if ranking else parts


def _sync_commands(run: RunFolder) -> list[str]:
    """Return the commands that send what trackers have recorded offline in a run (`sync_commands`);
    [] where a folder can't be read, as another user's."""
    try:
        return sync_commands(run)
    except OSError:
        return []


def select_runs(root: Path, queue: Queue, show_all: bool) -> tuple[list[RunFolder], int]:
    """Return the `MOST_RUNS` newest runs below `root` and older runs with a live job, newest first;
    and the number of all other runs. With `show_all` return all runs, and 0. `queue` has the user's
    jobs in Slurm. Raise OSError where `root` can't be read."""
    runs = all_runs(root)
    if show_all or len(runs) <= MOST_RUNS:
        return runs, 0
    # The index of jobs may have the cluster's full name, its short one, or none.
    clusters = (queue.cluster, JobRef("", queue.cluster).cluster_name, "")
    live_paths = linked_runs(
        root, (JobRef(id, cluster) for id in queue.live for cluster in clusters)
    )
    selection = runs[:MOST_RUNS]
    selection += [run for run in runs[MOST_RUNS:] if str(run.path.resolve()) in live_paths]
    return selection, len(runs) - len(selection)


def sort_live_first(rows: Sequence[Status]) -> list[Status]:
    """Return the rows of live runs, then the others; each in their former order."""
    return sorted(rows, key=lambda row: not row.state.is_live)


def read_statuses(
    root: Path,
    runs: Sequence[RunFolder],
    queue: Queue,
    count_run: Callable[[], None] = lambda: None,
) -> list[Status]:
    """Return the status of each run, in their order; for a run that can't be read it is
    `unreadable_status`, and nothing is raised.

    `count_run` is called after each run, for a progress bar. The cache in `root` (`StatusCache`) is
    read and written.
    """
    cache = StatusCache(root, queue)
    statuses = []
    for run in runs:
        statuses.append(_read_status(cache, run))
        count_run()
    cache.save()
    return statuses


def _read_status(cache: StatusCache, run: RunFolder) -> Status:
    """Return a run's status; after any error its `unreadable_status`, so that one run does not hide
    the others."""
    try:
        return cache.status_of(run)
    except Exception as error:  # damage has many forms
        return unreadable_status(run, f"{type(error).__name__}: {error}")


def runs_table(rows: Sequence[Status], width: int | None = None, colours: bool = False) -> str:
    """Return the rows, one or more, as a table with a header. A column in which all cells are empty
    is left out, except those of `_SHOWN_WHEN_EMPTY`. Raise TypeError without rows.

    Parameters
    ----------
    width
        the terminal's width in characters: columns are dropped until the others fit, in the order
        of `_DROP_ORDER`, and ``why`` is cut; None: no limit
    colours
        states are coloured by terminal codes
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
    for row in [{name: name for name in names}, *cells]:  # the header comes first
        padded = {name: row[name].ljust(widths[name]) for name in names}
        padded["why"] = _cut(row["why"], why_width())
        code = COLOURS.get(row["state"]) if colours else None
        if code:
            padded["state"] = f"\033[{code}m{padded['state']}\033[0m"
        lines.append("  ".join(padded.values()).rstrip())
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    """Return a text; one that is longer than `width` is cut to so many characters, with … as the
    last one, or to … alone for a width below 1."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def _cells(row: Status) -> dict[str, str]:
    """Return the cells of a run's row by column, without control characters and cut to
    `WIDEST_CELL`; ``-`` for an unknown one. ``why`` is not cut, and '' without a reason."""
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
    """Return the time to the run's last step as text, and the time to its time limit if that comes
    before; None where both are unknown."""
    limit_s = row.time_left_s
    if row.eta_s is None:
        return None if limit_s is None else f"limit {duration(limit_s)}"
    if limit_s is not None and limit_s < row.eta_s:
        return f"{duration(row.eta_s)}, limit {duration(limit_s)}"
    return duration(row.eta_s)


def query_terminal() -> tuple[int | None, bool]:
    """Return the terminal's width in characters, and whether colours may be written to it; None and
    False where stdout is no terminal."""
    if not sys.stdout.isatty():
        return None, False
    return shutil.get_terminal_size().columns, "NO_COLOR" not in os.environ
