"""Undoes what a start has changed in an older run, where Slurm has refused the job or never
answered.

A note in the run's folder has what is needed for that. It is there from before the first change
until Slurm has accepted the job: so the next start can undo one that Ctrl-C or a lost connection
has ended.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_ddp.core import checkpoints
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import list_names, read_json, write_whole
from hpc_ddp.core.journal.events import Fresh
from hpc_ddp.core.journal.journal import first_attempt, read_events
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import describe_work, read_queue
from hpc_ddp.submission.run_files.start_claim import claim_start, release_start

FIELDS = {  # of the note, with their types
    "time": float, "attempts": int, "files": dict, "first_attempts": dict,
    "code": list, "aside": list,
}  # fmt: skip


def note_earlier(run: RunFolder) -> None:
    """Write the note by which a start of `run` can be undone, in place of an older note: the
    content of the files that a start changes, the number of attempts, the attempt with which each
    part began anew, and the names of the snapshots and of the checkpoints set aside. Raise OSError
    where a file can't be read, or the note can't be written."""
    parts = (run, *run.tasks())
    contents = {
        str(path.relative_to(run.path)): path.read_bytes().decode(errors="surrogateescape")
        for path in _changed_files(run)
        if path.exists()
    }
    note = {
        "time": time.time(),
        "attempts": _count_attempts(run),
        "files": contents,
        "first_attempts": {_name_in(run, part): _begun_anew(part) for part in parts},
        "code": [path.name for path in _snapshots(run)],
        "aside": [str(path.relative_to(run.path)) for path in _aside(run)],
    }
    write_whole(run.start_note, json.dumps(note), mode=0o600)  # variables may be secret


def _changed_files(run: RunFolder) -> list[Path]:
    """Return the files that a start of `run` may change."""
    marks = (part.cancelled for part in (run, *run.tasks()))
    return [run.job_json, run.limits_json, run.script, *marks]


def _read_note(run: RunFolder) -> dict[str, Any]:
    """Return the note of a run; {} without one, and for one that is damaged, which stderr says."""
    note = read_json(run.start_note)
    if note and not all(isinstance(note.get(key), kind) for key, kind in FIELDS.items()):
        say(f"warning: {run.start_note} is damaged: what a refused start has changed stays")
        return {}
    return note


def remove_note(run: RunFolder) -> None:
    """Remove the note of a start that Slurm has accepted. Where the disk refuses, it stays, and
    nothing is raised: the job's first attempt makes it void."""
    with suppress(OSError):
        run.start_note.unlink()


def undo_start(run: RunFolder) -> None:
    """Undo a start of `run` by its note: give the files their earlier content, remove the start's
    snapshot of the code, move back the checkpoints that it has set aside, journal that nothing
    begins anew, and remove the note. The new library stays. Without a note nothing is done.

    Nothing is raised. A file that can't be written stays as it is; where the disk refuses that or
    anything else, stderr says so, and the note stays for the next try.
    """
    note = _read_note(run)
    if not note:
        return
    refusals: list[OSError] = []
    names = {str(path.relative_to(run.path)): path for path in _changed_files(run)}
    for name in note["files"].keys() & names.keys():
        path, content = names[name], note["files"][name].encode(errors="surrogateescape")
        try:
            if not path.exists() or path.read_bytes() != content:
                write_whole(path, content, mode=0o644)
        except OSError as error:  # the others are written all the same
            refusals.append(error)
    try:
        for snapshot in _snapshots(run):
            if snapshot.name not in note["code"]:
                shutil.rmtree(snapshot, ignore_errors=True)
        for folder in _aside(run):
            if str(folder.relative_to(run.path)) not in note["aside"]:
                checkpoints.bring_back(RunFolder(folder.parent.parent), folder)
        for part in (run, *run.tasks()):  # a script that saves by itself has nothing to move
            before = note["first_attempts"].get(_name_in(run, part), 0)
            if _begun_anew(part) != before:
                part.journal("submit").write_surely(Fresh(before))
        if refusals:
            raise refusals[0]
        remove_note(run)
    except OSError as error:
        say(
            f"warning: of the refused start of {run.path} remains {error.filename}:"
            f" {error.strerror}; the next one tries again to undo it"
        )


def undo_broken_start(run: RunFolder) -> None:
    """Undo each start of a run, of its array or of a task of it that was broken off before Slurm
    had answered, and report that on stderr. Where the start's job has begun since, only the note is
    removed; where the job may be queued, nothing is done.

    Raises
    ------
    UsageError
        another process starts the run just now, or Slurm does not say what is queued
    OSError
        a journal can't be read, the run can't be claimed, or as `describe_work`
    """
    for part in {run.path: run, run.whole: RunFolder(run.whole)}.values():
        for folder in (part, *part.tasks()):
            if folder.start_note.exists():
                _undo_if_broken(folder)


def _undo_if_broken(run: RunFolder) -> None:
    """Do what `undo_broken_start` does, with its errors, for one run that has a note; the run is
    claimed meanwhile."""
    claim_start(run)
    try:
        note = _read_note(run)
        if not note:
            return
        if _count_attempts(run) > note["attempts"]:
            remove_note(run)  # the job was queued all the same
            return
        queue = read_queue()
        if queue.problem:
            raise UsageError(
                f"a start of {run.path} was broken off, and it is not known whether its job is"
                f" queued: {queue.problem}",
                hint="the same command again, once Slurm answers",
            )
        if describe_work(run, queue, guesses=queue.jobs is not None) is None:
            undo_start(run)
            at = time.strftime("%b %d %H:%M", time.localtime(note["time"]))
            say(
                f"note: a start of {run.path} was broken off before Slurm had answered ({at}):"
                " settings, code and checkpoints are those from before it"
            )
    finally:
        release_start(run)


def _begun_anew(run: RunFolder) -> int:
    """Return the attempt with which a run, or a task, began anew (``--fresh``); 0 without. It reads
    the one journal that has it. Raise OSError where that can't be read."""
    return first_attempt(read_events(run.journal_folder, "submit"))


def _name_in(run: RunFolder, part: RunFolder) -> str:
    """Return the path of a task in the folder of its run; ``.`` for the run itself."""
    return str(part.path.relative_to(run.path))


def _count_attempts(run: RunFolder) -> int:
    """Return how many attempts a run and its tasks have had. May raise OSError."""
    return sum(part.next_attempt() for part in (run, *run.tasks()))


def _snapshots(run: RunFolder) -> list[Path]:
    """Return the snapshots of a run's code, without those of its array. May raise OSError."""
    return [run.code / name for name in list_names(run.code) if name.isdecimal()]


def _aside(run: RunFolder) -> list[Path]:
    """Return the folders of checkpoints of a run and its tasks that were set aside. May raise
    OSError."""
    folders = [part.checkpoints for part in (run, *run.tasks())]
    return [
        folder / name
        for folder in folders
        for name in list_names(folder)
        if name.startswith("aside-")
    ]
