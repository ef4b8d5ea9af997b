"""Which old runs, or checkpoints of theirs, may go, and taking them away.

Nothing that is queued or at work is touched. The last good checkpoint of an unfinished run stays
whatever was asked for, with all that is needed to go on from it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_ddp.report import live
from hpc_ddp.report.status import age, columns, status_of
from hpc_ddp.run import checkpoints
from hpc_ddp.run.errors import HpcDdpError, UsageError
from hpc_ddp.run.folder import RunFolder, all_runs
from hpc_ddp.run.progress import Progress
from hpc_ddp.run.spec import JobSpec

TRASH = ".trash"  # below the folder of all runs, so that moving there is one rename
STATES = ("finished", "failed", "cancelled", "stopped", "lost", "rendered")

# What a run's folder has by itself. Anything else in one that is not finished may be of use.
OURS = {
    *("job.json", "job.sbatch", "code", "lib", "journal", "logs", "checkpoints"),
    *("limits.json", "early-links.json"),
    *("submitit", "tensorboard", "cancelled", "report.html", "compare.html"),
}
# How long after its last word a run may still be at work that Slurm does not know.
SILENT_S = 86400.0

_Mark = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Item:
    """What may go of one run.

    Attributes
    ----------
    age_s
        seconds since something was last written down of it
    paths
        the run's folder, or checkpoints of it
    bytes
        the size of all files in them
    mark
        changes when somebody takes the run up
    """

    run: RunFolder
    state: str
    age_s: float
    paths: tuple[Path, ...]
    bytes: int
    mark: _Mark

    @property
    def whole(self) -> bool:
        return self.paths == (self.run.path,)

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.run.path),
            "state": self.state,
            "age_s": round(self.age_s),
            "paths": [str(path) for path in self.paths],
            "bytes": self.bytes,
        }


def parse_age(text: str) -> float:
    """Return the seconds of ``30d``, ``12h`` or ``4w``.

    Raises
    ------
    UsageError
        it is something else
    """
    match = re.fullmatch(r"(\d{1,6})([hdw])", text, re.A)
    if not match:
        raise UsageError(
            f"older-than {text!r} is no age; accepted: hours, days and weeks, as 12h, 30d, 4w",
            hint="hpc-ddp clean --older-than 30d",
        )
    return int(match[1]) * {"h": 3600.0, "d": 86400.0, "w": 604800.0}[match[2]]


def plan(
    root: Path,
    named: Sequence[RunFolder],
    older_than_s: float,
    states: Collection[str],
    checkpoints_only: bool,
) -> list[Item]:
    """Return what may go, of the named runs or else of all below `root`, newest first.

    Parameters
    ----------
    older_than_s
        only runs of which nothing was written down for so many seconds
    states
        only runs in these states; none: in any
    checkpoints_only
        of finished runs, too, only checkpoints but the last good one and the best

    Raises
    ------
    UsageError
        a named run is at work, or may be, or is part of an array, or not below `root`
    """
    queue = live.queue()
    items = []
    runs = named or all_runs(root)
    with Progress("looking at the runs", len(runs)) as progress:
        for run in runs:
            progress.add(1)
            refused = _refused(run, root, queue)
            if refused and named:
                raise refused
            if refused:
                continue
            mark = _mark(run)
            age_s = time.time() - max((changed / 1e9 for *_, changed in mark), default=0.0)
            try:
                state = status_of(run, queue.jobs if queue else {}).state
            except Exception:  # damage has many forms, and is no reason to delete anything
                state = "unreadable"
            unknown = state == "unreadable" or (state == "lost" and age_s < SILENT_S)
            if unknown and named:
                raise UsageError(
                    f"run {run.id} is {state}: it may be at work on another cluster, or be mended",
                    hint=f"hpc-ddp explain {run.id}; a day after its last word it may go",
                )
            if unknown or age_s < older_than_s or (states and state not in states):
                continue
            paths = _what_goes(run, state, checkpoints_only)
            if paths:
                items.append(Item(run, state, age_s, paths, sum(map(_size, paths)), mark))
    return items


def _refused(run: RunFolder, root: Path, queue: live.Queue | None) -> UsageError | None:
    if run.is_task:
        return UsageError(
            f"{run.id} is a task of an array, which goes as a whole",
            hint=f"hpc-ddp clean {run.id.partition('/')[0]}",
        )
    # A link on the way would lead to where others keep their things.
    if run.path.resolve() != root.resolve() / run.path.parent.name / run.path.name:
        return UsageError(
            f"run {run.path} is not below {root}", hint=f"--runs-dir {run.path.parent.parent}"
        )
    if not _is_ours(run):
        return UsageError(
            f"{run.path} has a job.json, but is no run of hpc-ddp", hint="rm -r, if it is to go"
        )
    if at_work := live.at_work(run, queue):
        return UsageError(f"run {run.id} is at work: {at_work}", hint=f"hpc-ddp cancel {run.id}")
    return None


def _is_ours(run: RunFolder) -> bool:
    """Tell whether a folder with a job.json has been made by hpc-ddp."""
    try:
        JobSpec.from_json(run.job_json.read_text())
    except (HpcDdpError, OSError, ValueError):
        return False
    return run.journal_folder.is_dir() or (run.lib / "hpc_ddp").is_dir()


def _what_goes(run: RunFolder, state: str, checkpoints_only: bool) -> tuple[Path, ...]:
    each = [run, *run.tasks()]
    folders = [one.checkpoints for one in each]
    begun = any(map(_has_any, folders)) or any(map(_has_own, each))
    if not checkpoints_only and (state == "finished" or not begun):
        return (run.path,)
    # A link would lead to where others keep their things.
    own = (folder for folder in folders if folder.resolve().is_relative_to(run.path.resolve()))
    return tuple(path for folder in own for path in _superseded(folder))


def _has_own(run: RunFolder) -> bool:
    """Tell whether something is there that is not hpc-ddp's: results of the script, say."""
    names = {path.name for path in run.path.iterdir() if not path.name.startswith((".", "task-"))}
    return bool(names - OURS) or (run.is_task and run.finished())


def _has_any(folder: Path) -> bool:
    """Tell whether something is there that a run could go on from, be it no checkpoint of ours."""
    return folder.is_dir() and any(".tmp-" not in path.name for path in folder.iterdir())


def _superseded(folder: Path) -> list[Path]:
    """Return the checkpoints that are older than the last good one, but for the best.

    None where no good one is found: a disk in trouble may make all look bad.
    """
    found = checkpoints.all_of(folder)
    if len(found) < 2:
        return []
    for good in checkpoints.candidates(folder):
        if checkpoints.verify(good) is None:
            step = checkpoints.step_of(good)
            best = (checkpoints.read_manifest(good).get("best") or {}).get("step")
            kept = (good, folder / f"step-{best}")
            return [p for p in found if checkpoints.step_of(p) <= step and p not in kept]
    return []


def _mark(run: RunFolder) -> _Mark:
    """Return name, size and time (ns) of what everybody changes who takes a run up."""
    found = [run.job_json, *run.code.glob("*")]
    for each in (run, *run.tasks()):
        found += [*each.journal_folder.glob("*"), *each.logs.glob("*")]
    return tuple(sorted(filter(None, (_facts(path, run.path) for path in found))))


def _facts(path: Path, start: Path) -> tuple[str, int, int] | None:
    with suppress(OSError):
        stat = path.lstat()
        return str(path.relative_to(start)), stat.st_size, stat.st_mtime_ns
    return None


def _size(path: Path) -> int:
    """Return the bytes of all files below a folder; links are not followed."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def take_away(items: Sequence[Item], root: Path) -> Iterator[tuple[Item, str]]:
    """Delete, and give back each item as it is done, with why it was not, or ''.

    A folder is renamed before it is deleted: whoever comes in between finds it whole or not at
    all, and what an interruption leaves over goes the next time.
    """
    trash = root / TRASH
    if trash.is_symlink():
        raise HpcDdpError(f"{trash} is a link, which is not followed", hint=f"rm {trash}")
    trash.mkdir(exist_ok=True, mode=0o700)
    queue = live.queue()  # once more: a question to a person lies in between
    with Progress("deleting", sum(item.bytes for item in items)) as progress:
        for item in items:
            try:
                problem = _take(item, trash, queue)
            except OSError as error:
                problem = str(error)
            progress.add(item.bytes)
            yield item, problem
        shutil.rmtree(trash, ignore_errors=True)


def _take(item: Item, trash: Path, queue: live.Queue | None) -> str:
    run, taken_up = item.run, "it was taken up meanwhile, and left alone"
    if live.at_work(run, queue) or _mark(run) != item.mark:
        return taken_up
    moved = [trash / os.urandom(8).hex() for _ in item.paths]
    for path, away in zip(item.paths, moved, strict=True):
        path.rename(away)
    if item.whole and _mark(RunFolder(moved[0])) != item.mark:
        moved[0].rename(run.path)
        return taken_up
    if item.whole:
        _forget(run)
    for away in moved:
        shutil.rmtree(away)
    return ""


def _forget(run: RunFolder) -> None:
    """Remove what is left of a run outside of it: job ids that lead to it, an empty folder."""
    index = run.root / ".jobs"
    for link in index.iterdir() if index.is_dir() else ():
        with suppress(OSError):
            target = Path(os.path.normpath(index / os.readlink(link)))
            if target.is_relative_to(run.path):
                link.unlink()
    with suppress(OSError):
        run.path.parent.rmdir()  # fails while there are other runs


COLUMNS = ("name", "id", "state", "age", "what goes", "size")


def table(items: Sequence[Item]) -> str:
    """Return what may go as a table, with the sum."""
    rows = [
        (item.run.name, item.run.id, item.state, age(item.age_s), _in_words(item), size(item.bytes))
        for item in items
    ]
    total = ("", "", "", "", "", size(sum(item.bytes for item in items)))
    return columns(COLUMNS, [*rows, total] if len(rows) > 1 else rows)


def _in_words(item: Item) -> str:
    count = len(item.paths)
    return "the whole run" if item.whole else f"{count} old checkpoint{'s' * (count > 1)}"


def size(count: int) -> str:
    """Return a number of bytes in its biggest unit."""
    for unit, each in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= each:
            return f"{count / each:.1f} {unit}"
    return f"{count} B"
