"""The states of runs that have ended, remembered from one look to the next.

Reading the journals of two thousand runs takes many seconds, and those of runs that have ended say
the same each time. What was found stands in ``<runs>/.status.json``, beside the name, size and
time of every file that it was found in: it counts only as long as all of these are as they were,
and none of the run's jobs is in the queue. A run that goes on is never remembered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from hpc_ddp import __version__, slurm
from hpc_ddp.report.status import LIVE, Status, judge
from hpc_ddp.run.folder import RunFolder, read_json, write_json
from hpc_ddp.run.journal import Event, last_event, read_briefly

FORMAT = [__version__, *(field.name for field in fields(Status))]


class Remembered:
    """Looks at runs below `root`; `save` keeps what was found for the next time."""

    def __init__(self, root: Path, queue: Mapping[str, slurm.Queued]) -> None:
        self._path, self._queue = root / ".status.json", queue
        told = read_json(self._path)
        known = told.get("runs") if told.get("format") == FORMAT else None
        self._known: dict[str, Any] = known if isinstance(known, dict) else {}
        self._changed = False

    def status_of(self, run: RunFolder) -> Status:
        """Return the state of one run."""
        seen, name = _seen(run), str(run.path)
        known = self._known.get(name, {})
        with suppress(KeyError, TypeError, AttributeError):  # a damaged memory is none
            if known["seen"] == seen and not any(job in self._queue for job in known["jobs"]):
                return _aged(Status(**known["status"]), known["saved_at"])
        events = read_briefly(run.journal_folder)
        jobs = run.job_ids(events)
        found = judge(run, events, jobs, self._queue)
        saved = last_event(events, "checkpoint")
        if _has_ended(found, events) and not any(job in self._queue for job in jobs):
            self._known[name] = {
                "seen": seen,  # from before: what has come meanwhile is not in it
                "jobs": jobs,
                "saved_at": saved["time"] if saved else None,
                "status": asdict(found),
            }
            self._changed = True
        elif self._known.pop(name, None):
            self._changed = True
        return found

    def save(self) -> None:
        """Keep what was found, where the folder can be written: it only saves time."""
        if self._changed:
            runs = {name: each for name, each in self._known.items() if os.path.isdir(name)}
            with suppress(OSError):
                write_json(self._path, {"format": FORMAT, "runs": runs})
            self._changed = False


def _aged(status: Status, saved_at: float | None) -> Status:
    return status if saved_at is None else replace(status, last_checkpoint_s=time.time() - saved_at)


def _has_ended(status: Status, events: list[Event]) -> bool:
    """Tell whether nothing more comes of a run without a word in its journal, or in the queue."""
    last = last_event(events, "submitted", "started", "verdict")
    judged = last is not None and last["event"] == "verdict"
    return status.state not in LIVE and (judged or status.state in ("finished", "cancelled"))


def _seen(run: RunFolder) -> list[Any]:
    """Return what changes when anything changes that a run's state depends on."""
    try:
        names = os.listdir(run.path)
    except OSError:  # it is just being removed
        return []
    folders = [str(run.path), *(f"{run.path}/{n}" for n in sorted(names) if n.startswith("task-"))]
    found: list[Any] = [os.path.exists(f"{folder}/cancelled") for folder in folders]
    for folder in folders:
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(f"{folder}/journal")):
                # Opened, since NFS may answer a mere question from a cache.
                descriptor = os.open(f"{folder}/journal/{name}", os.O_RDONLY)
                try:
                    facts = os.fstat(descriptor)
                finally:
                    os.close(descriptor)
                found.append([name, facts.st_size, facts.st_mtime_ns])
    return found
