"""The runs below a folder: all of them, and the one of a name, an id or a job."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import check_links
from hpc_ddp.core.run_folder import RunFolder


def link_job(job_id: str, run: RunFolder) -> None:
    """Note below ``<runs>/.jobs`` which run a job id belongs to, so that a look-up is one step.

    The job does as well without the note: a disk that takes none is reported on stderr, not raised.
    """
    index = run.root / ".jobs"
    try:
        index.mkdir(parents=True, exist_ok=True)
        check_links(index)
        link = index / job_id
        if link.is_symlink():
            link.unlink()
        link.symlink_to(os.path.relpath(run.path, index))
    except OSError as error:
        say(f"job {job_id} can't be found by its id: {error}")


def find_run(root: Path, text: str) -> RunFolder:
    """Return the run that a person means: a folder, a run id, a run's name (newest), a job id.

    `root` is the folder of all runs. A folder in the working directory comes first, whichever user
    made it. It is read as data; `file_owners.check_executable` keeps what is in it from being
    started. Links of other users count as absent.

    Raises
    ------
    UsageError
        there is no such run
    OSError
        `text` is too long for a path, or a run's folder or journal can't be read
    """
    candidates = [Path(text).absolute()] if text else []
    if text and not set(text) & {"/", "\0"}:
        name = glob.escape(text)
        job, _, task = text.partition("_")  # as Slurm names a task of an array
        linked = [root / ".jobs" / job / f"task-{task}", root / ".jobs" / text]
        candidates += [
            *(path for path in linked if _has_job(path, job)),
            *_newest(root.glob(f"[!.]*/{name}")),  # a plain start's are all called `local`
        ]
        # A run that was only rendered comes after those that have started.
        named = _newest(root.glob(f"{name}/*"))
        candidates += sorted(named, key=lambda run: not any(run.glob("journal/*.jsonl")))
    if re.fullmatch(r"[^/\0]+/task-\d+", text):  # an id, as `hpc-ddp status` shows it
        candidates += root.glob(f"[!.]*/{glob.escape(text)}")
    for path in candidates:
        if "\0" not in text and (path / "job.json").is_file() and is_trusted(path):
            return RunFolder(path.resolve())
    raise UsageError(
        f"no run {text!r}: not a run folder, and no run id, run name or job id in {root}",
        hint="list the runs with `hpc-ddp status`",
    )


def is_trusted(path: Path) -> bool:
    """Return whether a path exists, can be reached, and leads through no link of another user."""
    try:
        check_links(path)
    except OSError:
        return False
    return True


def _has_job(path: Path, job_id: str) -> bool:
    """Return whether the run in a folder, or its array, had this job: others may write links to it.

    Raise OSError where its journal can't be read.
    """
    if not is_trusted(path / "job.json"):
        return False
    run = RunFolder(path.resolve())
    runs = {run.path: run, run.whole: RunFolder(run.whole)}.values()
    return any(job_id in part.job_ids(part.events()) for part in runs)


def all_runs(root: Path) -> list[RunFolder]:
    """Return the runs below the folder `root`, the one that began last first; [] for a missing
    folder."""
    paths = (path.parent for path in root.glob("[!.]*/*/job.json"))
    return [RunFolder(path) for path in _newest(paths)]


def _newest(runs: Iterable[Path]) -> list[Path]:
    """Return run folders, the one that began last first."""
    return sorted(runs, key=_begun, reverse=True)


def _begun(run: Path) -> tuple[str, float, str]:
    """Return what sorts run folders by when they began: their id has it, or else the time of their
    job.json. One without either comes before all others."""
    if re.match(r"\d{8}-\d{6}-", run.name):
        return run.name[:15], 0.0, run.name
    try:
        when = (run / "job.json").stat().st_mtime
    except OSError:
        return "", 0.0, run.name
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(when)), when, run.name
