"""Every path of a run, in one place.

::

    <runs>/<name>/<run id>/
        job.json job.sbatch          the job, and the script that runs
        code/<n>/                    the snapshot of the n-th submit
        lib/hpc_ddp/                 the node-side part of hpc-ddp, so that no upgrade and no
                                     environment on the nodes can get in between
        journal/<writer>.jsonl
        logs/slurm.out
        logs/attempt-<k>/attempt.json, notice, failed, fabric, end-time, trackers, secret
        logs/attempt-<k>/<node>/rank-<r>.log, agent.log, printed, notice, record.json,
                                (where each worker is a task: notice-<r>, record-<r>.json, …)
                                and of a hang stack-rank-<r>.txt, flight-rank-<r>
        checkpoints/step-<n>/
        tensorboard/
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.console.units import plural
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import list_names, make_private, read_json, write_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder, PathIn
from hpc_ddp.core.job.job_ref import JobRef, remove_duplicates
from hpc_ddp.core.journal.events import JournalEvent, Queued, Started
from hpc_ddp.core.journal.journal import Journal, is_finished, node_seconds, read_events

T = TypeVar("T")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # on a disk, or in the user's quota


@dataclass(frozen=True)
class RunFolder:
    """One job's life on disk, stable across requeues. `path` is absolute."""

    path: Path

    job_json = PathIn("job.json")
    script = PathIn("job.sbatch")
    lib = PathIn("lib")
    code = PathIn("code")
    submitit = PathIn("submitit")  # its task loads a pickle from there
    journal_folder = PathIn("journal")
    logs = PathIn("logs")
    checkpoints = PathIn("checkpoints")
    # The JSON file of the limits that operators have set for a run, by their keys.
    limits_json = PathIn("limits.json")
    # The JSON file of the chain's jobs that are still in their set-up lines: by the id of such a
    # job the next job that it has queued.
    early_links = PathIn("early-links.json")
    vain_jobs = PathIn("vain-jobs.json")
    # By a job's id the unix time before which it is not to start, until Slurm has taken that.
    pauses = PathIn("pauses.json")
    # The note by which a start that Slurm has not accepted is undone.
    start_note = PathIn(".before-start.json")
    # The file that exists once the user has cancelled the run: nothing may requeue it then.
    cancelled = PathIn("cancelled")
    # The file that exists once a copy of ``--stage`` may be wrong, or the files for it take the
    # room of a checkpoint; it has the reason. While it exists, no attempt of the run, or of this
    # task alone, starts from a copy or packs one.
    unstaged = PathIn("unstaged")
    torn_down = PathIn("torn-down")  # the teardown of the finished run has ended

    @property
    def is_task(self) -> bool:
        """True for the folder of a task of an array; it lies in the array's folder."""
        return self.path.name.startswith("task-")

    @property
    def whole(self) -> Path:
        """The array's folder for a task of it, else the run's own."""
        return self.path.parent if self.is_task else self.path

    @property
    def index(self) -> int:
        """A task's index in its array; raises ValueError for a run that is no task."""
        return int(self.path.name.removeprefix("task-"))

    def task(self, index: int) -> RunFolder:
        """Return the folder of one task of an array; nothing is made."""
        return RunFolder(self.path / f"task-{index}")

    @property
    def newest_code(self) -> Path | None:
        """The newest snapshot of the run's code; a task without one of its own has that of its
        array. None where there is none. Raises OSError where a folder can't be listed."""
        for folder in (self.code, RunFolder(self.whole).code):
            if numbers := _numbers_behind("", folder):
                return folder / str(numbers[-1])
        return None

    def tasks(self) -> list[RunFolder]:
        """Return the tasks of an array that have begun, by index; [] for a run that is no array.
        Raise OSError where the folder can't be listed."""
        return [self.task(index) for index in _numbers_behind("task-", self.path)]

    @property
    def id(self) -> str:
        """``<run id>``; of a task ``<run id>/task-<n>``."""
        return str(self.path.relative_to(self.whole.parent))

    @property
    def quoted(self) -> str:
        """The path as a word for a shell. Commands in hints name a run by it: an id may be that of
        several runs (``local`` of each plain start)."""
        return shlex.quote(str(self.path))

    @property
    def name(self) -> str:
        """The job's name: that of the folder in which the run, or its array, lies."""
        return self.whole.parent.name

    @property
    def root(self) -> Path:
        """``<runs>``, the folder of all runs."""
        return self.whole.parent.parent

    @property
    def most_requeues(self) -> float:
        """How often the operators let the run, or each task of its array, be requeued; inf where no
        limit can be read."""
        most = read_json(RunFolder(self.whole).limits_json).get("max-requeues")
        return most if isinstance(most, int) else math.inf

    @property
    def vain_text(self) -> str:
        """How many starts have come to nothing, by no preemption, since the newest attempt, as
        ``2 starts came to nothing: its output says why``; '' for none."""
        count = sum(n for n in read_json(self.vain_jobs).values() if isinstance(n, int))
        return f"{plural(count, 'start')} came to nothing: its output says why" if count else ""

    @property
    def vain_nodes(self) -> Path:
        """The file of the run, or of its array, with the unix times at which starts that had worked
        before failed on a node, by the node's name."""
        return self.whole / "vain-nodes.json"

    @property
    def slurm_out(self) -> Path:
        return self.logs / "slurm.out"

    def outputs(self) -> list[Path]:
        """Return the files with the output of the run's jobs, by name. For a task these are the
        array's file for the task, and the files of jobs of its own, where it went on alone; the
        file that was written last comes last. Raise OSError where the disk does not answer."""
        paths = sorted(self.logs.glob("slurm*.out"))
        if not self.is_task:
            return paths
        of_array = RunFolder(self.whole).logs / f"slurm-{self.index}.out"
        if of_array.exists():
            paths.append(of_array)
        return sorted(paths, key=lambda path: path.stat().st_mtime)

    @property
    def parcel(self) -> Path:
        """The folder of files that ``--stage`` starts from, which an array's tasks share."""
        return self.whole / "stage"

    def unstage(self, reason: str) -> None:
        """Write the file `unstaged`, with the reason, so that later attempts use no copy of
        ``--stage``. Raise OSError where the disk refuses."""
        self.unstaged.write_text(f"{reason} (to allow it again: rm {self.unstaged})")

    def remove_parcel(self, content: str) -> bool:
        """Remove the parcel of ``--stage``, since the disk has no room for some `content`, as "a
        checkpoint"; mark the run as `unstaged`, print that, and return True. Return False where
        there is no parcel. Refusals of the disk are passed over."""
        if not self.parcel.exists():
            return False
        shutil.rmtree(self.parcel, ignore_errors=True)
        with suppress(OSError):  # it is written once there is room
            self.unstage(f"its disk had no room for {content}")
        say(f"no room for {content}: {self.parcel} of --stage is removed")
        return True

    def make_room_for(self, content: str, write: Callable[[], T]) -> T:
        """Call `write`, which takes no argument and writes some `content`; return its result. Where
        the disk has no room, remove the parcel of ``--stage``, and call it once more. Raise as
        `write`, also where there is no parcel."""
        try:
            return write()
        except OSError as error:
            if error.errno not in NO_ROOM or not self.remove_parcel(content):
                raise
            return write()

    def make(self, is_new: bool = False) -> RunFolder:
        """Create the folder, private to the user, with the folders that must exist before the job
        starts, and return this run. A folder that exists is made private, too.

        Raise FileExistsError if `is_new` and another submit has made the folder, and OSError where
        it can't be made.
        """
        folders = ("journal", "logs", "checkpoints")
        for _ in range(10):
            with suppress(FileNotFoundError):  # a `clean` has just removed the empty folder above
                make_private(self.path, folders, is_new)
                return self
        make_private(self.path, folders, is_new)
        return self

    def journal(self, writer: str, attempt: int = 0) -> Journal:
        """Return the journal in which `writer` writes events of an attempt. Nothing is made on
        disk."""
        return Journal(self.journal_folder, writer, attempt)

    def events(self) -> list[JournalEvent]:
        """Return the journal's events, by attempt and time; [] where there are none. Raise OSError
        where the journal can't be read."""
        return read_events(self.journal_folder)

    def links(self) -> list[JobRef]:
        """Return the next jobs of a chain that earlier jobs of the run have queued, those of
        attempts first; [] for a run that is no chain. Raise OSError where the attempts can't be
        listed."""
        early = map(str, read_json(self.early_links).values())
        links = [attempt.link for attempt in self.attempts()] + [*map(JobRef.parse, early)]
        return [link for link in links if link]  # without the None of attempts that queued no job

    def jobs(self, events: Sequence[JournalEvent]) -> list[JobRef]:
        """Return all jobs of the run, whose journal is `events`: first those that Slurm has taken
        or that have started, oldest first, then those of `links` that are not among them. Raise
        OSError where the attempts can't be listed."""
        starts = [event for event in events if isinstance(event, (Queued, Started))]
        jobs = [JobRef.of(event.job_id, event.cluster) for event in starts]
        return remove_duplicates([*filter(None, jobs), *self.links()])

    def finished(self) -> bool:
        """Return whether the run has reached its end by its journal, so that nothing is left to do.
        Raise OSError where the journal can't be read."""
        return is_finished(self.events())

    def lacks_teardown(self, lines: Sequence[str]) -> bool:
        """Return whether the run is finished, and the `lines` of its teardown, if any, have not
        come to their end: a preemption, or the time, cut them off. Raise as `finished`."""
        return bool(lines) and not self.torn_down.exists() and self.finished()

    def gpu_hours(self, gpus_per_node: int, now: float | None = None) -> float:
        """Return the GPU hours that the run has used so far; for an array or a task of it, those of
        all tasks together.

        `gpus_per_node` counts workers for a run without GPUs. An attempt that goes on ends at
        `now`, in unix seconds; with None, at its last event. Raise OSError where a journal can't be
        read.
        """
        runs = RunFolder(self.whole).tasks() or [self]  # no array: the run itself
        return sum(node_seconds(run.events(), now) for run in runs) * gpus_per_node / 3600

    def attempt(self, number: int) -> AttemptFolder:
        """Return the folder of an attempt; nothing is made."""
        return AttemptFolder(self.logs / f"attempt-{number}")

    def attempts(self) -> list[AttemptFolder]:
        """Return the folders of the attempts so far, oldest first; [] before the first. Raise
        OSError where they can't be listed."""
        return [self.attempt(number) for number in _numbers_behind("attempt-", self.logs)]

    def next_attempt(self) -> int:
        """Return the number of the attempt that begins next. Raise OSError where the attempts can't
        be listed, or the journal can't be read."""
        return self._number_after(self.attempts())

    def _number_after(self, earlier: list[AttemptFolder]) -> int:
        """Return the number after the newest of the attempts `earlier`. Without any, as where the
        user has removed all folders, return the number after the journal's newest attempt, 0
        without one; raise OSError where the journal can't be read."""
        if earlier:
            return earlier[-1].number + 1
        starts = (event.attempt for event in self.events() if isinstance(event, Started))
        return max(starts, default=-1) + 1

    def claim_attempt(
        self, info: dict[str, Any], is_live: Callable[[dict[str, Any]], bool]
    ) -> AttemptFolder:
        """Make the folder of the next attempt for the caller, and return it. Processes that call
        this at the same time get different attempts.

        Parameters
        ----------
        info
            the caller's identity; kept in ``attempt.json``
        is_live
            tells of an attempt, by such an `info`, whether it still runs; its errors pass through

        Raises
        ------
        HpcDdpError
            the newest attempt is still running: two at once would write over each other
        OSError
            the attempts can't be listed, the folder can't be made, or the journal can't be read
        """
        while True:
            earlier = self.attempts()
            if earlier and is_live(earlier[-1].info):
                raise HpcDdpError(
                    f"run {self.path} is already being run: {_describe_attempt(earlier[-1])}",
                    hint="wait for it, or end it with `hpc-ddp cancel`",
                )
            attempt = self.attempt(self._number_after(earlier))
            if self._make_attempt(attempt, info):
                return attempt

    def _make_attempt(self, attempt: AttemptFolder, info: dict[str, Any]) -> bool:
        """Make the attempt's folder, with its files, in one step, and return True; return False
        where another process has made it. Raise OSError where the disk refuses."""
        self.logs.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".attempt-", dir=self.logs))
        _drop_default_acl(draft)
        try:
            write_json(draft / "attempt.json", info)
            for name in ("notice", "failed", "fit", "fabric", "end-time", "trackers"):
                (draft / name).touch(mode=0o644)
            (draft / "secret").touch(mode=0o600)
            (draft / "secret").write_bytes(secrets.token_bytes(32))
            draft.rename(attempt.path)  # fails on a folder that isn't empty: ours never is
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return False
        return True

    def is_newest(self, attempt: int) -> bool:
        """Return whether no attempt after number `attempt` has started: only the newest one may
        change the run. Raise OSError where the attempts can't be listed."""
        # By listing the folder: a look-up of a missing name may be answered from an NFS cache.
        return all(later.number <= attempt for later in self.attempts())


def _describe_attempt(attempt: AttemptFolder) -> str:
    """Return the words for an attempt and its job or process."""
    info = attempt.info
    process = f"job {info['job_id']}" if info.get("job_id") else f"process {info.get('pid')}"
    return f"attempt {attempt.number}, {process} on {info.get('host')}"


def _numbers_behind(prefix: str, folder: Path) -> list[int]:
    """Return, sorted, the numbers N of the names ``<prefix>N`` in a folder; other names are left
    out. [] for a missing folder; raise OSError where it can't be listed."""
    ends = (name[len(prefix) :] for name in list_names(folder) if name.startswith(prefix))
    return sorted(int(number) for number in ends if number.isdecimal())


def _drop_default_acl(folder: Path) -> None:
    """Remove a new folder's default ACL, which the folders of a project often have: with it the
    files made in the folder would be open to the project's group, whatever the umask. An error is
    passed over: most file systems have no such ACL."""
    with suppress(OSError, AttributeError):  # the latter: not on Linux
        os.removexattr(folder, "system.posix_acl_default")
