"""A cache of the status of ended runs.

Reading the journals of two thousand runs takes many seconds, and the journals of ended runs do not
change. The status of each ended run is kept in ``<runs>/.status-<uid>.json``, with name, size and
time of every file that it was read from. It is valid as long as all of them are unchanged and none
of the run's jobs is in the queue. The status of a live run is never kept.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from hpc_ddp import __version__
from hpc_ddp.core.file_io import read_json, write_whole
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.journal.events import (
    CheckpointSaved,
    JournalEvent,
    Started,
    Submitted,
    VerdictGiven,
)
from hpc_ddp.core.journal.journal import last_event, read_briefly
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue
from hpc_ddp.report.status.run_state import RunState
from hpc_ddp.report.status.run_status import Status, summarize

# Links are not followed: another user may have chosen a device, which the opening would change.
OPENING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
CACHE_FORMAT = [__version__, *(field.name for field in fields(Status))]


class StatusCache:
    """Returns the status of runs below `root` (`status_of`), and keeps that of ended runs in a file
    for later commands (`save`).

    `queue` has the user's jobs in Slurm. A file that is damaged, of another version, another
    user's, or open to others is not read.
    """

    def __init__(self, root: Path, queue: Queue) -> None:
        self._path, self._queue = root / f".status-{os.geteuid()}.json", queue
        content = read_json(self._path) if _is_private(self._path) else {}
        entries = content.get("runs") if content.get("format") == CACHE_FORMAT else None
        # By the paths of the runs, as `status_of` makes them.
        self._entries: dict[str, Any] = entries if isinstance(entries, dict) else {}
        self._changed = False

    def status_of(self, run: RunFolder) -> Status:
        """Return the status of one run, from the cache, or, where its entry is not valid, from the
        run's journal. After a read of the journal the entry is replaced if the run has ended, else
        removed; `save` writes the file. Raise OSError where a journal of the run or its tasks can't
        be read.
        """
        files, name = _fingerprint(run), str(run.path)
        entry = self._entries.get(name, {})
        with suppress(KeyError, TypeError, AttributeError, ValueError):  # the entry is damaged
            if entry["files"] == files and not self._has_queued(run, entry["jobs"]):
                return _restore_status(entry["status"], entry["saved_at"])
        events = read_briefly(run.journal_folder)
        jobs = run.jobs(events)
        status = summarize(run, events, jobs, self._queue)
        saved = last_event(events, CheckpointSaved)
        names = [str(job) for job in jobs]
        if _has_ended(status, events) and not self._has_queued(run, names):
            self._entries[name] = {
                "files": files,  # from before: a later line of the journal is not in the status
                "jobs": names,
                "saved_at": saved.time if saved else None,
                "status": asdict(status),
            }
            self._changed = True
        elif self._entries.pop(name, None):
            self._changed = True
        return status

    def _has_queued(self, run: RunFolder, jobs: list[str]) -> bool:
        """Return whether one of a run's `jobs`, texts for `JobRef.parse`, is in Slurm's queue;
        False where Slurm can't be asked."""
        return any(self._queue.find(JobRef.parse(job), run) for job in jobs)

    def save(self) -> None:
        """Write the cache's file if an entry has changed; entries of runs that are gone are left
        out. Where the disk refuses, nothing is raised: the cache only saves time."""
        if self._changed:
            entries = {name: entry for name, entry in self._entries.items() if os.path.isdir(name)}
            text = json.dumps({"format": CACHE_FORMAT, "runs": entries})
            with suppress(OSError):  # private, as runs are: it has the text of errors
                write_whole(self._path, text, mode=0o600)
            self._changed = False


def _is_private(path: Path) -> bool:
    """Return whether a file is this user's, and no other user can read or write it; False without
    the file. Others may have put one into the folder of runs, which they may share."""
    with suppress(OSError):
        status = path.lstat()
        return status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return False


def _restore_status(values: dict[str, Any], saved_at: float | None) -> Status:
    """Return the status with the attributes `values`, an entry's. The age of its last checkpoint is
    that of now, by `saved_at`: the time at which the checkpoint was saved, in unix seconds (None
    without one). Raise KeyError, TypeError or ValueError for a damaged entry."""
    status = Status(**{**values, "state": RunState(values["state"])})
    return status if saved_at is None else replace(status, last_checkpoint_s=time.time() - saved_at)


def _has_ended(status: Status, events: list[JournalEvent]) -> bool:
    """Return whether a run's status stays as it is until its journal has a new line, or it has a
    new job."""
    last = last_event(events, Submitted, Started, VerdictGiven)
    has_verdict = isinstance(last, VerdictGiven)
    is_final = status.state in (RunState.FINISHED, RunState.CANCELLED)
    return not status.state.is_live and (has_verdict or is_final)


def _fingerprint(run: RunFolder) -> list[object]:
    """Return values that change whenever the files change from which a run's status is read:
    whether the run and each task is cancelled, when their starts in vain were last counted, and
    name, size in bytes and time in ns of each file of their journals. [] for a run whose folder
    can't be listed, as one that is being removed. Raise OSError where a journal, also a task's,
    can't be listed or opened."""
    try:
        names = os.listdir(run.path)
    except OSError:  # it is just being removed
        return []
    folders = [str(run.path), *(f"{run.path}/{n}" for n in sorted(names) if n.startswith("task-"))]
    fingerprint: list[object] = [os.path.exists(f"{folder}/cancelled") for folder in folders]
    for folder in folders:
        with suppress(FileNotFoundError):
            fingerprint.append(os.stat(f"{folder}/vain-jobs.json").st_mtime_ns)
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(f"{folder}/journal")):
                # Opened, since NFS may answer a stat alone from a cache.
                descriptor = os.open(f"{folder}/journal/{name}", OPENING)
                try:
                    status = os.fstat(descriptor)
                finally:
                    os.close(descriptor)
                fingerprint.append([name, status.st_size, status.st_mtime_ns])
    return fingerprint
