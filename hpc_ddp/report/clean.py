"""Deletes old runs, or their old checkpoints.

Queued and live runs are never touched. The last good checkpoint of an unfinished run always stays,
with all files that the run needs to go on.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_ddp.core import checkpoints
from hpc_ddp.core.console.progress import ProgressBar
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.console.units import byte_count, duration, plural
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import ROOT
from hpc_ddp.core.file_owners import check_folder, other_owner
from hpc_ddp.core.job.trackers import mlflow_id_file, sync_commands
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import all_runs, unlink_jobs
from hpc_ddp.live_jobs import Queue, describe_work, read_queue
from hpc_ddp.report.status.run_state import RunState, spec_of
from hpc_ddp.report.status.run_status import status_of
from hpc_ddp.report.tables import align_columns

# Names of folders beside a run begin so. Each is new, and so this user's own: other users may share
# the folder of all runs.
TRASH = ".hpc-ddp-trash-"  # a run that is being deleted; nothing else is called so
HOLDING = ".holding-"  # a run on its way into the trash, which may have to go back
RESUMED = "it was resumed meanwhile, and left alone"
STATES = ("finished", "failed", "cancelled", "stopped", "lost", "rendered")
COLUMNS = ("name", "id", "state", "age", "to delete", "size")

# The entries of a run's folder that hpc-ddp makes. Any other one may be a result of the script.
# fmt: off
RUN_ENTRIES = {
    "job.json", "job.sbatch", "limits.json", "early-links.json", "code", "lib", "journal", "logs",
    "checkpoints", "submitit", "tensorboard", "cancelled", "report.html", "compile-cache",
    "stage", "unstaged", "torn-down", "vain-jobs.json", "vain-nodes.json", "pauses.json",
}
# fmt: on
# Hidden entries: hpc-ddp's own, drafts, and a file system's for a deleted file that is open.
_DRAFTS = "draft|preflight|nfs|fuse_hidden|__afs|panfs"
_HIDDEN = re.compile(rf"\.(start|before-start.json|lib-earlier|({_DRAFTS}).*|.*\.\w{{16}})")
# A lost run may still be at work, on another cluster, until it has been silent for so long.
SILENT_S = 86400.0

# Name, size and time (ns) of each file that changes when a run goes on.
_Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Deletion:
    """The part of a run that may be deleted.

    Attributes
    ----------
    age_s
        seconds since the run's last change
    paths
        the run's folder alone, or some checkpoints of the run and its tasks
    bytes
        the size of all files below `paths`
    fingerprint
        a value that changes when the run goes on
    """

    run: RunFolder
    state: RunState
    age_s: float
    paths: tuple[Path, ...]
    bytes: int
    fingerprint: _Fingerprint

    @property
    def is_run(self) -> bool:
        """Whether the whole run may be deleted, and not some of its checkpoints."""
        return self.paths == (self.run.path,)

    def to_dict(self) -> dict[str, Any]:
        """Return the deletion for JSON."""
        return {
            "run": str(self.run.path),
            "state": self.state,
            "age_s": round(self.age_s),
            "paths": [str(path) for path in self.paths],
            "bytes": self.bytes,
        }


def find_deletions(
    root: Path,
    named: Sequence[RunFolder],
    older_than_s: float,
    states: Collection[str],
    checkpoints_only: bool,
) -> list[Deletion]:
    """Query Slurm, and return the parts of runs that may be deleted, one for each run that has
    some: of the `named` runs in their order, else the newest run first. Nothing is deleted.
    Messages and a bar go to stderr.

    Other users' runs are left out, also for root: Slurm lists no jobs of theirs here. Without
    `named`, runs that are at work or damaged, or may be, are left out, too.

    Parameters
    ----------
    named
        the runs to look at; empty: all below `root`
    older_than_s, states
        only runs without a change for so many seconds, and in one of these states (empty: in any)
    checkpoints_only
        only old checkpoints (`_old_checkpoints`), also of finished runs, and no whole run

    Raises
    ------
    UsageError
        a named run is another user's, not hpc-ddp's, at work, or may be, a task of an array, not
        below `root`, lost within `SILENT_S`, or its state can't be read
    OSError
        a named run's folder or journal can't be read
    """
    queue = read_queue()
    if queue.problem:
        say(f"{queue.problem}; runs that have a job are left alone")
    deletions = []
    runs = _own_runs(named, root)
    with ProgressBar("reading the runs", len(runs)) as progress:
        for run in runs:
            progress.add(1)
            try:
                _check_deletable(run, root, queue)
                fingerprint = _fingerprint(run)
                state, age_s = _read_state(run, queue, fingerprint)
                if age_s < older_than_s or (states and state not in states):
                    continue
                paths = _deletable_paths(run, state, checkpoints_only)
            except Exception:  # in use, or damaged, which has many forms
                if named:
                    raise
                continue
            if paths:
                size = sum(map(_bytes_below, paths))
                deletions.append(Deletion(run, state, age_s, paths, size, fingerprint))
    return deletions


def _own_runs(named: Sequence[RunFolder], root: Path) -> list[RunFolder]:
    """Return all `named` runs, or without any the user's own runs below `root`, newest first. Raise
    UsageError for a named run of another user. For root, stderr has the number of other users'
    runs."""
    runs = named or all_runs(root)
    owners = {run: other_owner(run.path) for run in runs}
    foreign = [run for run in runs if owners[run]]
    if foreign and named:
        owner = owners[foreign[0]]
        raise UsageError(f"run {foreign[0].path} is of {owner}", hint="its owner can clean it")
    if foreign and os.geteuid() == ROOT:
        say(f"{plural(len(foreign), 'run')} of other users: only the owners can clean them")
    return [run for run in runs if not owners[run]]


def _read_state(run: RunFolder, queue: Queue, fingerprint: _Fingerprint) -> tuple[RunState, float]:
    """Return a run's state, and its age: the seconds since the last change in its `fingerprint`.
    Raise UsageError where the state can't be read, for any reason, and for a lost run that has
    changed within `SILENT_S`."""
    age_s = time.time() - max((changed / 1e9 for *_, changed in fingerprint), default=0.0)
    try:
        state = status_of(run, queue).state
    except Exception:  # damage has many forms, and is no reason to delete anything
        state = RunState.UNREADABLE
    if state is RunState.UNREADABLE or (state is RunState.LOST and age_s < SILENT_S):
        raise UsageError(
            f"run {run.path} is {state}: it may be at work on another cluster, or be repaired",
            hint=f"hpc-ddp explain {run.quoted}; a day after its last event it may be deleted",
        )
    return state, age_s


def _check_deletable(run: RunFolder, root: Path, queue: Queue) -> None:
    """Raise UsageError for a run that is a task, lies elsewhere than below `root`, is not
    hpc-ddp's, or is at work. Where Slurm can't be asked, each run that has a job, or was never
    started, counts as at work. Raise OSError where the run's folder or journal can't be read."""
    if run.is_task:
        raise UsageError(
            f"{run.path} is a task of an array, which is deleted as one",
            hint=f"hpc-ddp clean {RunFolder(run.whole).quoted}",
        )
    # A link on the way would lead to files of others.
    if run.path.resolve() != root.resolve() / run.path.parent.name / run.path.name:
        raise UsageError(
            f"run {run.path} is not below {root}", hint=f"--runs-dir {run.path.parent.parent}"
        )
    if not _is_from_hpc_ddp(run):
        raise UsageError(
            f"{run.path} has a job.json, but is no run of hpc-ddp", hint="rm -r deletes it"
        )
    if work := describe_work(run, queue):
        raise UsageError(f"run {run.path} is at work: {work}", hint=f"hpc-ddp cancel {run.quoted}")


def _is_from_hpc_ddp(run: RunFolder) -> bool:
    """Return whether hpc-ddp has made the folder `run`: it has a job.json that can be read, and a
    journal or a copy of hpc-ddp."""
    has_job = spec_of(run) is not None
    return has_job and (run.journal_folder.is_dir() or (run.lib / "hpc_ddp").is_dir())


def _deletable_paths(run: RunFolder, state: RunState, checkpoints_only: bool) -> tuple[Path, ...]:
    """Return the paths of a run that may be deleted, () without any. It is the run's folder if the
    run is finished, or if neither it nor a task has a checkpoint or a result, unless a tracker's
    record was not sent (`_has_unsent_record`, which may print). Else, and with `checkpoints_only`
    always, it is the old checkpoints of the run and its tasks; folders of checkpoints that lead out
    of the run, by a link, are left out. Raise OSError where a folder or journal can't be read."""
    runs = [run, *run.tasks()]
    is_needed = any(_has_checkpoint(task.checkpoints) or _has_results(task) for task in runs)
    is_whole = not checkpoints_only and (state is RunState.FINISHED or not is_needed)
    if is_whole and not _has_unsent_record(run):
        return (run.path,)
    top = run.path.resolve()
    folders = (task.checkpoints for task in runs if task.checkpoints.resolve().is_relative_to(top))
    return tuple(path for folder in folders for path in _old_checkpoints(folder))


def _has_unsent_record(run: RunFolder) -> bool:
    """Return whether an offline record of W&B in a run was not sent; of other trackers that is not
    known. If a record was not sent, or perhaps was not, a line on stderr names the command that
    sends it. Raise OSError where a folder can't be read."""
    commands = sync_commands(run)
    is_unsent = any(command.startswith("wandb") for command in commands)
    if commands:
        fate = "stays: a record was" if is_unsent else "has a record that perhaps was"
        say(f"{run.path} {fate} not sent: {commands[0]}")
    return is_unsent


def _has_results(run: RunFolder) -> bool:
    """Return whether a run's folder has an entry that hpc-ddp has not made: it may be a result of
    the script. True for a finished task, too. Raise OSError where the folder can't be listed, or a
    task's journal can't be read."""
    tasks = {task.path.name for task in run.tasks()}
    names = {path.name for path in run.path.iterdir()} - RUN_ENTRIES - tasks
    # The file of MLflow's id may have an attempt's number behind its name.
    id_name = mlflow_id_file(run).name
    is_ours = all(name.startswith(id_name) or _HIDDEN.fullmatch(name) for name in names)
    return not is_ours or (run.is_task and run.finished())


def _has_checkpoint(folder: Path) -> bool:
    """Return whether a folder of checkpoints has an entry, hpc-ddp's or the script's, that is no
    draft; False without the folder. Raise OSError where it can't be listed."""
    return folder.is_dir() and any(".tmp-" not in path.name for path in folder.iterdir())


def _old_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints up to the step of the newest good one, also broken and half-written
    ones; but not the newest good one, the best, and those of ``keep_every``. Checkpoints are read
    in full, the newest first, until one is good.

    [] where there are less than two, or none is good: a disk in trouble may make all look bad.
    Raise OSError where the folder can't be listed.
    """
    paths = checkpoints.all_of(folder)
    if len(paths) < 2:
        return []
    for good in checkpoints.candidates(folder):
        if checkpoints.verify(good) is None:
            step = checkpoints.step_of(good)
            manifest = checkpoints.read_manifest(good)
            best, every = (manifest.get("best") or {}).get("step"), manifest.get("keep_every")
            every = every if isinstance(every, int) else None
            milestones = checkpoints.milestones(checkpoints.published(folder), every)
            exempt = {good, folder / f"step-{best}", *milestones}
            return [p for p in paths if checkpoints.step_of(p) <= step and p not in exempt]
    return []


def _fingerprint(run: RunFolder) -> _Fingerprint:
    """Return name, size and time of the files that change when a run or a task of it goes on,
    sorted; files that are gone are left out."""
    paths = [run.job_json, *run.code.glob("*")]
    for task in (run, *run.tasks()):
        paths += [*task.journal_folder.glob("*"), *task.logs.glob("*")]
    fingerprint = []
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            name = str(path.relative_to(run.path))
            fingerprint.append((name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(fingerprint))


def _bytes_below(path: Path) -> int:
    """Return the bytes of all files below a folder; links are not followed, and files that are gone
    are not counted. A file with n names (hard links, by which checkpoints share frozen weights)
    counts with 1/n of its size under each."""
    total = 0.0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                total += status.st_size / status.st_nlink
    return round(total)


def delete_parts(deletions: Sequence[Deletion], root: Path) -> Iterator[tuple[Deletion, str]]:
    """Query Slurm anew, and delete as the caller iterates: yield each deletion with '' once it is
    made, or with the reason (also an error) why it was not. A bar on stderr shows the progress.

    A folder is renamed before it is deleted: another process finds it complete or not at all.
    After the last deletion the remains of this user's interrupted calls in `root` are deleted.
    """
    queue = read_queue()  # again: the user was asked in between
    with ProgressBar("deleting", sum(deletion.bytes for deletion in deletions)) as progress:
        for deletion in deletions:
            try:
                problem = _delete_part(deletion, queue)
            except HpcDdpError as error:
                problem = error.message
            except OSError as error:
                problem = str(error)
            progress.add(deletion.bytes)
            yield deletion, problem
        for remains in root.glob(f"[!.]*/{TRASH}*"):
            if not (other_owner(remains) or remains.is_symlink()):
                shutil.rmtree(remains, ignore_errors=True)
                _remove_empty(remains.parent)


def _delete_part(deletion: Deletion, queue: Queue) -> str:
    """Delete some checkpoints of a run, or the whole run. Return '', or, where the run has gone on,
    a sentence on why nothing was deleted. A checkpoint is first renamed, so that no reader takes it
    for one. Raise UsageError where others could put something else in the run's place, and OSError
    where a journal can't be read or the disk refuses, perhaps after some files were deleted."""
    run = deletion.run
    check_folder(run)
    if describe_work(run, queue) or _fingerprint(run) != deletion.fingerprint:
        return RESUMED
    if deletion.is_run:
        return _delete_run(run, deletion.fingerprint)
    for path in deletion.paths:
        unused = f"step-{checkpoints.step_of(path)}.tmp-{os.urandom(8).hex()}"
        shutil.rmtree(path.rename(path.with_name(unused)))
    return ""


def _delete_run(run: RunFolder, fingerprint: _Fingerprint) -> str:
    """Delete a run, its entries in the index of jobs, and the folder of its name if that is empty
    then. Return '', or, where the run has gone on and stays, a sentence on that.

    The run is first moved into a `HOLDING` folder. Only if its `fingerprint` is the same there, it
    becomes a `TRASH` folder, which later calls delete as remains. Raise OSError where the disk
    refuses, perhaps after some files were deleted.
    """
    holding = Path(tempfile.mkdtemp(prefix=HOLDING, dir=run.path.parent))
    try:
        target = run.path.rename(holding / run.path.name)
        if _fingerprint(RunFolder(target)) != fingerprint:
            try:
                target.rename(run.path)
            except OSError as error:  # the run may have made its folder anew
                return f"{RESUMED}, in {target}: {error.strerror}"
            return RESUMED
        trash = holding.rename(holding.with_name(holding.name.replace(HOLDING, TRASH, 1)))
        unlink_jobs(run)
        shutil.rmtree(trash)
    finally:
        _remove_empty(holding)
        _remove_empty(run.path.parent)
    return ""


def _remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty and can be removed."""
    with suppress(OSError):
        folder.rmdir()


def deletion_table(deletions: Sequence[Deletion]) -> str:
    """Return the deletions as a table; below several is the sum of their sizes."""
    rows = [_cells(deletion) for deletion in deletions]
    if len(rows) > 1:
        total = byte_count(sum(deletion.bytes for deletion in deletions))
        rows.append(("", "", "", "", "", total))
    return align_columns(COLUMNS, rows)


def _cells(deletion: Deletion) -> tuple[str, ...]:
    """Return the cells of a deletion's row, by `COLUMNS`."""
    run, age = deletion.run, duration(deletion.age_s)
    part = "the run" if deletion.is_run else plural(len(deletion.paths), "old checkpoint")
    return (run.name, run.id, str(deletion.state), age, part, byte_count(deletion.bytes))
