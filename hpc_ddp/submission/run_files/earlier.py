"""Undoes what a start has changed in an older run, where Slurm has refused the job or never
answered.

A note in the run's folder has what is needed for that. It is there from before the first change
until Slurm has accepted the job: so the next start can undo one that Ctrl-C or a lost connection
has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
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

_REFUSED = ".refused-"  # begins the name of a snapshot that is being removed
NOTE_FIELDS = {  # with their types
    "time": float, "attempts": int, "files": dict, "first_attempts": dict,
    "code": list, "aside": list,
}  # fmt: skip


def note_earlier(run: RunFolder) -> None:
    """Write the note by which a start of `run` can be undone, in place of an older note. It has the
    content of the files that a start changes, the number of attempts, the attempt with which the
    run and each of its tasks began anew, and the names of the snapshots and of the folders of
    checkpoints set aside. Raise OSError where a file can't be read, or the note not be written."""
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
        "first_attempts": {_name_in(run, part): _fresh_attempt(part) for part in parts},
        "code": [path.name for path in _snapshots(run)],
        "aside": [str(path.relative_to(run.path)) for path in _folders_aside(run)],
    }
    write_whole(run.start_note, json.dumps(note), mode=0o600)  # variables may be secret


def _changed_files(run: RunFolder) -> list[Path]:
    """Return the files that a start of `run` may change."""
    marks = (part.cancelled for part in (run, *run.tasks()))
    return [run.job_json, run.limits_json, run.script, *marks]


def _read_note(run: RunFolder) -> dict[str, Any]:
    """Return the note of a run. Return {} without a note, and for one that lacks a field, with a
    warning on stderr."""
    note = read_json(run.start_note)
    if note and not all(isinstance(note.get(key), kind) for key, kind in NOTE_FIELDS.items()):
        say(f"warning: {run.start_note} is damaged: what a refused start has changed stays")
        return {}
    return note


def remove_note(run: RunFolder) -> None:
    """Remove the note of a start that Slurm has accepted. Where the disk refuses, the note stays,
    and nothing is raised: it has no effect once the job's first attempt has begun."""
    with suppress(OSError):
        run.start_note.unlink()


def undo_start(run: RunFolder) -> None:
    """Undo a start of `run` by its note: give the files their earlier content, remove the start's
    snapshot of the code, move back the checkpoints that the start has set aside, journal again the
    attempt of the last ``--fresh`` before this start, and remove the note. The new library stays.
    Without a note nothing is done.

    Nothing is raised. After an error of the disk a warning on stderr names the file, and the note
    stays for the next try; files that can be written have their earlier content then.
    """
    note = _read_note(run)
    if not note:
        return
    refusals = _write_back(run, note["files"])
    try:
        refusals += _remove_snapshots(run, note["code"])
        for folder in _folders_aside(run):
            if str(folder.relative_to(run.path)) not in note["aside"]:
                checkpoints.bring_back(RunFolder(folder.parent.parent), folder)
        # Also without checkpoints to move back: a script may save by itself.
        for part in (run, *run.tasks()):
            before = note["first_attempts"].get(_name_in(run, part), 0)
            if _fresh_attempt(part) != before:
                part.journal("submit").write_surely(Fresh(before))
        if refusals:
            raise refusals[0]
        remove_note(run)
    except OSError as error:
        say(
            f"warning: of the refused start of {run.path} remains {error.filename}:"
            f" {error.strerror}; the next one tries again to undo it"
        )


def _write_back(run: RunFolder, contents: Mapping[str, str]) -> list[OSError]:
    """Give files of a run their earlier content, by their names in the run's folder; return the
    errors of the files that can't be read or written. Names other than those of `_changed_files`
    are passed over."""
    refusals: list[OSError] = []
    names = {str(path.relative_to(run.path)): path for path in _changed_files(run)}
    for name in contents.keys() & names.keys():
        path, content = names[name], contents[name].encode(errors="surrogateescape")
        try:
            if not path.exists() or path.read_bytes() != content:
                write_whole(path, content, mode=0o644)
        except OSError as error:
            refusals.append(error)
    return refusals


def _remove_snapshots(run: RunFolder, kept_names: Sequence[str]) -> list[OSError]:
    """Remove the snapshots of a run but those of `kept_names`, and what is left of such as an
    earlier call could not remove; return the errors. Each gets another name first: so none of them
    is the run's newest code, also where the disk keeps a file of it. May raise OSError where the
    folder can't be listed."""
    refusals: list[OSError] = []
    for snapshot in _snapshots(run):
        if snapshot.name not in kept_names:
            try:
                snapshot.rename(
                    snapshot.with_name(f"{_REFUSED}{snapshot.name}-{os.urandom(2).hex()}")
                )
            except OSError as error:
                refusals.append(error)
    for name in list_names(run.code):
        if name.startswith(_REFUSED):
            try:
                shutil.rmtree(run.code / name)
            except OSError as error:
                refusals.append(error)
    return refusals


def undo_broken_start(run: RunFolder) -> None:
    """Undo each start that was broken off before Slurm had answered: of a run, of its tasks, and
    for a task also of its array and the array's tasks; notes on stderr report it. Where the start's
    job has begun since, only the note is removed; where the job is queued, nothing is done.

    Raises
    ------
    UsageError
        another process starts the run just now, or Slurm does not say what is queued
    OSError
        a journal can't be read, the run can't be claimed, or as `describe_work`
    """
    # By path: `run.whole` is the array of a task, else the run itself.
    for part in {run.path: run, run.whole: RunFolder(run.whole)}.values():
        for folder in (part, *part.tasks()):
            if folder.start_note.exists():
                _undo_if_broken(folder)


def _undo_if_broken(run: RunFolder) -> None:
    """Do what `undo_broken_start` does, with its errors, for one run that has a note. The run is
    claimed while this function works."""
    claim_start(run)
    try:
        note = _read_note(run)
        if not note:
            return
        if _count_attempts(run) > note["attempts"]:
            remove_note(run)  # the job was queued all the same, and has begun
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
            began = time.strftime("%b %d %H:%M", time.localtime(note["time"]))
            say(
                f"note: a start of {run.path} was broken off before Slurm had answered ({began}):"
                " settings, code and checkpoints are those from before it"
            )
    finally:
        release_start(run)


def _fresh_attempt(run: RunFolder) -> int:
    """Return the number of the attempt with which a run, or a task, began anew (``--fresh``); 0 if
    it never did. Raise OSError where the journal can't be read."""
    # Only the login node, the writer "submit", journals it.
    return first_attempt(read_events(run.journal_folder, "submit"))


def _name_in(run: RunFolder, part: RunFolder) -> str:
    """Return the path of a part in the folder of `run`; ``.`` for the run itself."""
    return str(part.path.relative_to(run.path))


def _count_attempts(run: RunFolder) -> int:
    """Return how many attempts a run and its tasks have had in all. May raise OSError."""
    return sum(part.next_attempt() for part in (run, *run.tasks()))


def _snapshots(run: RunFolder) -> list[Path]:
    """Return the folders of snapshots of a run's code: of a task its own, without those of its
    array. May raise OSError."""
    return [run.code / name for name in list_names(run.code) if name.isdecimal()]


def _folders_aside(run: RunFolder) -> list[Path]:
    """Return the folders of a run and its tasks into which checkpoints were set aside. May raise
    OSError."""
    folders = [part.checkpoints for part in (run, *run.tasks())]
    return [
        folder / name
        for folder in folders
        for name in list_names(folder)
        if name.startswith("aside-")
    ]
