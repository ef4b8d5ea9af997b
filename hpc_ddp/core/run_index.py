"""Finds runs below a folder: all of them, or the one of a name, an id or a job."""

from __future__ import annotations

import errno
import glob
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import check_links, list_names, make_folders, read_json
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.slurm_values import array_indexes
from hpc_ddp.core.run_folder import RunFolder

UNKNOWN = "_"  # in the index, for a cluster that is not known


def link_job(job: JobRef, run: RunFolder) -> None:
    """Note which run a job belongs to, by a link below ``<runs>/.jobs-<uid>/<cluster>``, by which
    `find_run` finds the run at once. An earlier note of a job of this id is replaced.

    Where the disk takes no note, or another user has put a folder or a link there, that is reported
    on stderr and not raised: the job does not need the note.
    """
    index = _index_of(run.root)
    link = _link_path(run.root, job)
    try:
        if os.path.lexists(index):  # before a folder is made behind a link of another user
            check_links(index)
        make_folders(link.parent)
        check_links(link.parent)
        if index.stat().st_uid != os.geteuid():
            raise OSError(errno.EPERM, "a folder of another user", str(index))
        if link.is_symlink():
            link.unlink()
        link.symlink_to(os.path.relpath(run.path, link.parent))
    except OSError as error:
        say(f"job {job.id} can't be found by its id: {error}")


def unlink_jobs(run: RunFolder) -> None:
    """Remove the notes that `link_job` has made of a run and its tasks; a note that the disk does
    not let go stays."""
    for link in _index_of(run.root).glob("*/*"):
        with suppress(OSError):
            target = Path(os.path.normpath(link.parent / os.readlink(link)))
            if target.is_relative_to(run.path):
                link.unlink()


def linked_runs(root: Path, jobs: Iterable[JobRef]) -> set[str]:
    """Return the real paths of the runs below `root` to which jobs belong by the notes of
    `link_job`, and of their arrays.

    The set is only good for looking up whether a run is in it: for a job without a note it has the
    path that the note would have.
    """
    paths = {os.path.realpath(_link_path(root, job)) for job in jobs}
    return paths | {os.path.dirname(path) for path in paths}


def _index_of(root: Path) -> Path:
    """Return the folder with the notes of `link_job` of this user, below the folder of all runs,
    which users may share."""
    return root / f".jobs-{os.geteuid()}"


def _link_path(root: Path, job: JobRef) -> Path:
    """Return the path of the link that `link_job` makes for a job, ``<cluster>/<id>``."""
    return _index_of(root) / (job.cluster or UNKNOWN) / job.id


def find_run(root: Path, text: str, ask_cluster: Callable[[], str] = str) -> RunFolder:
    """Return the run that a person means by `text`, the first that exists of: the run in the folder
    of this path; the run of this job id; the run of this run id; the newest run of this name.

    `root` is the folder of all runs. A job id counts on the cluster that `ask_cluster` returns,
    by default '' for unknown; it is called only where a job of some run has the id, and its errors
    pass through. A folder of the working directory comes first, whichever user made it: it is read
    as data, and `file_owners.check_executable` keeps commands from starting what is in it. A path
    through a link of another user counts as absent.

    Raises
    ------
    UsageError
        there is no such run, the task has not begun, or several clusters have jobs of the id and it
        is not clear which is meant
    OSError
        `text` is too long for a path, or a run's folder or journal can't be read
    """
    plain = re.sub(r"/task-0+(?=\d+$)", "/task-", text)  # task-02 is task-2
    candidates = [Path(form).absolute() for form in dict.fromkeys((text, plain)) if form]
    jobs_by_run: dict[Path, JobRef] = {}
    cluster = ""
    if text and not set(text) & {"/", "\0"}:
        name = glob.escape(text)
        jobs_by_run = _runs_of_job(root, text)
        cluster = ask_cluster() if jobs_by_run else ""
        candidates += [
            *_only_run_of_cluster(jobs_by_run, cluster),
            *_newest_first(root.glob(f"[!.]*/{name}")),  # a plain start's are all called `local`
        ]
        # Runs that have started come first, the newest of them first: the sort is stable.
        named = _newest_first(root.glob(f"{name}/*"))
        candidates += sorted(named, key=lambda run: not any(run.glob("journal/*.jsonl")))
    if re.fullmatch(r"[^/\0]+/task-\d+", plain):  # an id, as `hpc-ddp status` shows it
        candidates += root.glob(f"[!.]*/{glob.escape(plain)}")
    for path in candidates:
        if "\0" not in text and (path / "job.json").is_file() and is_trusted(path):
            return RunFolder(path.resolve())
    _refuse_text(root, plain, jobs_by_run, cluster)


def _refuse_text(root: Path, text: str, jobs_by_run: dict[Path, JobRef], cluster: str) -> NoReturn:
    """Raise UsageError for a `text` that means no run: it is the id of jobs (`jobs_by_run`), but
    not of exactly one of the cluster; or the task has not begun; or there is no such run. Raise
    OSError where `root` can't be listed."""
    if jobs_by_run:
        runs = ", ".join(f"{path} on {job.cluster or '?'}" for path, job in jobs_by_run.items())
        raise UsageError(
            f"job {text} of this cluster ({cluster or 'whose name is not known'}) is no single run;"
            f" jobs of that number: {runs}",
            hint="name the run by its id, the last part of its folder",
        )
    if task := _named_task(root, text):
        raise UsageError(
            f"task {task.index} of {task.whole} has not begun, and has no folder yet",
            hint="scancel JOB_INDEX cancels it; squeue --me names the array's job",
        )
    elsewhere = "its folder as RUN, --runs-dir, or cd to where it was submitted"
    raise UsageError(
        f"no run {text!r}: not a run folder, and no run id, run name or job id in {root}",
        # By `list_names`, which raises: a folder that can't be listed is not empty.
        hint="list the runs with `hpc-ddp status`" if list_names(root) else elsewhere,
    )


def _named_task(root: Path, text: str) -> RunFolder | None:
    """Return the folder, which need not exist, of a task that a person means by ``ARRAY/task-N``;
    ARRAY is the path of an array, or its id below `root`, the folder of all runs, and has a task N.
    None for any other text."""
    if "\0" in text or not re.fullmatch(r".*[^/]/task-\d+", text, flags=re.DOTALL):
        return None
    array, _, task = text.rpartition("/")
    arrays = [Path(array), *root.glob(f"[!.]*/{glob.escape(array)}")]
    index = int(task.removeprefix("task-"))
    folders = (path for path in arrays if is_trusted(path) and _has_task(path, index))
    return next((RunFolder(path.resolve() / task) for path in folders), None)


def _has_task(path: Path, index: int) -> bool:
    """Return whether a folder is that of an array with a task of this index, by its job.json; False
    where that is damaged."""
    try:
        return index in array_indexes(str(read_json(path / "job.json").get("array")))
    except UsageError:  # no array, or a damaged file
        return False


def is_trusted(path: Path) -> bool:
    """Return whether a path exists, can be reached, and leads through no link of another user."""
    try:
        check_links(path)
    except OSError:
        return False
    return True


def _runs_of_job(root: Path, text: str) -> dict[Path, JobRef]:
    """Return the runs below `root` that have a job of this id, each with its job. `text` is a job
    id, as ``28``, or that of an array's task, as ``28_3``. There may be several where clusters
    share the disk, and {} where there is none.

    Raise OSError where a run's journal can't be read.
    """
    number, _, task = text.partition("_")
    jobs: dict[Path, JobRef] = {}
    for folder in sorted(_index_of(root).glob("*/")):
        job = JobRef(number, "" if folder.name == UNKNOWN else folder.name)
        # A task in the folder of its array, or the job, or the task, of a link.
        for path in (folder / number / f"task-{task}", folder / text):
            if _has_job(path, job):
                jobs.setdefault(path.resolve(), job)
                break
    return jobs


def _only_run_of_cluster(jobs_by_run: dict[Path, JobRef], cluster: str) -> list[Path]:
    """Return [run] if exactly one of the runs has a job that may be of the cluster, else []. A job,
    or a `cluster`, whose name is '' may be of any."""
    paths = [path for path, job in jobs_by_run.items() if job.is_of(cluster)]
    return paths if len(paths) == 1 else []


def _has_job(path: Path, job: JobRef) -> bool:
    """Return whether the run in a folder, or its array, had this job by its journal: other users
    may write links of their own. Raise OSError where the journal can't be read."""
    if not is_trusted(path / "job.json"):
        return False
    run = RunFolder(path.resolve())
    runs = {run.path: run, run.whole: RunFolder(run.whole)}.values()
    return any(job.is_among(part.jobs(part.events())) for part in runs)


def all_runs(root: Path) -> list[RunFolder]:
    """Return the runs below the folder `root`, the one that began last first; [] for a missing
    folder. Raise OSError where `root`, or a folder in it, can't be listed; a folder that the user
    may not list, as a colleague's, is passed over."""
    paths = []
    for name in list_names(root):
        with suppress(PermissionError):
            entries = [] if name.startswith(".") else list_names(root / name)
            folders = (root / name / entry for entry in entries)
            paths += [folder for folder in folders if os.path.exists(folder / "job.json")]
    return [RunFolder(path) for path in _newest_first(paths)]


def _newest_first(runs: Iterable[Path]) -> list[Path]:
    """Return run folders, the one that began last first."""
    return sorted(runs, key=_start_key, reverse=True)


def _start_key(run: Path) -> tuple[str, float, str]:
    """Return a key that sorts run folders by the time when their runs began: the time in the run
    id, else that of the job.json. A folder with neither counts as the oldest."""
    if re.match(r"\d{8}-\d{6}-", run.name):
        return run.name[:15], 0.0, run.name
    try:
        when = (run / "job.json").stat().st_mtime
    except OSError:
        return "", 0.0, run.name
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(when)), when, run.name
