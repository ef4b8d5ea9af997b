"""The state of a run, and whether a job or a process still works on it.

`find_state` checks these conditions, in this order; the first one that applies decides:

1. Does the journal say that the run is finished?              ``finished``
2. Has the user cancelled it?                                  ``cancelled``
3. Has Slurm a live job of it?     ``waiting``, ``starting``, ``running``, ``suspended``, ``ending``
4. Has it tasks, and no process of this machine plays them?    ``finished``, ``array``
5. Was it never submitted?                                     ``rendered``
6. Has its newest attempt a verdict?       ``stopped``, ``failed``, ``cancelled``, ``superseded``
7. Does its process run on this machine?                       ``running``
8. Has a standalone script journaled its own end?              ``stopped``, ``failed``
9. None of these                                               ``lost``

Slurm's queue is asked for the user's own jobs. So another user's run is ``unknown`` where the
answer would be lost, or stopped until its next attempt.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_ddp import slurm
from hpc_ddp.core import process
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_text
from hpc_ddp.core.file_owners import other_owner
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.journal.events import (
    Finished,
    JournalEvent,
    Queued,
    RankFailed,
    Started,
    Stopped,
    Submitted,
    VerdictGiven,
)
from hpc_ddp.core.journal.journal import is_finished, last_event
from hpc_ddp.core.journal.vocabulary import Action, Word
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.slurm_text import OVER, QueuedJob


class RunState(Word):
    """The state of a run in one word; ``not begun`` is for tasks of an array."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDING = "ending"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    SUPERSEDED = "superseded"
    LOST = "lost"
    UNKNOWN = "unknown"
    RENDERED = "rendered"
    ARRAY = "array"
    NOT_BEGUN = "not begun"
    UNREADABLE = "unreadable"

    @property
    def is_live(self) -> bool:
        """Whether the run has a job or a process now."""
        return self in _LIVE

    @property
    def is_working(self) -> bool:
        """Whether the job has its nodes."""
        return self in _LIVE and self is not RunState.WAITING


# Slurm's states of a job that is not over.
_OF_JOB = {
    "PENDING": RunState.WAITING,
    "REQUEUED": RunState.WAITING,
    "CONFIGURING": RunState.STARTING,
    "RUNNING": RunState.RUNNING,
    "COMPLETING": RunState.ENDING,
    "SUSPENDED": RunState.SUSPENDED,
    "STOPPED": RunState.SUSPENDED,
}
_LIVE = frozenset(_OF_JOB.values())


def state_of_job(slurm_state: str) -> RunState | None:
    """Return the state of a run whose job is in a state of Slurm's; None when the job is over."""
    return _OF_JOB.get(slurm_state)


def find_state(
    run: RunFolder, events: Sequence[JournalEvent], queued: Sequence[QueuedJob]
) -> tuple[RunState, str]:
    """Return the state of a run, and the reason in words (Slurm's reason while it waits).

    Raise OSError where the journal of a task of it can't be read.

    Parameters
    ----------
    events
        the run's journal, by attempt and time
    queued
        the run's jobs that Slurm still has
    """
    state, why = _find_state(run, events, queued)
    last = last_event(events, Submitted, Started, VerdictGiven)
    goes_on = state is RunState.STOPPED and isinstance(last, VerdictGiven)
    if (state is RunState.LOST or goes_on) and (owner := other_owner(run.path)):
        return RunState.UNKNOWN, f"of {owner}, whose jobs are not looked at"
    return state, why


def _find_state(
    run: RunFolder, events: Sequence[JournalEvent], queued: Sequence[QueuedJob]
) -> tuple[RunState, str]:
    """Return state and reason as `find_state` does, for a run of this user."""
    if is_finished(events):
        return RunState.FINISHED, ""
    if run.cancelled.exists():
        return RunState.CANCELLED, ""
    last = last_event(events, Submitted, Started, VerdictGiven)
    job = next((job for job in queued if state_of_job(job.state)), None)
    if job and not (run.is_task and _is_final(last)):
        is_waiting = _OF_JOB[job.state] is RunState.WAITING
        return _OF_JOB[job.state], job.reason if is_waiting else job.nodes
    tasks = run.tasks()
    if tasks and not _has_live_process(last):
        return _state_of_array(run, tasks)
    if last is None:
        return RunState.RENDERED, "never submitted"
    if isinstance(last, VerdictGiven):
        return _state_of_verdict(last)
    if isinstance(last, Started) and last.pid is not None:
        return _state_of_process(last, events)
    return RunState.LOST, next((job.state.lower() for job in queued), "gone from the queue")


def _is_final(last: JournalEvent | None) -> bool:
    """Return whether a verdict without a requeue is the last word of a task.

    The last task of an array has the array's own job id, which is live while other tasks run.
    """
    return isinstance(last, VerdictGiven) and last.action != Action.REQUEUE


def _has_live_process(last: JournalEvent | None) -> bool:
    """Return whether the last event is a start whose process runs on this machine."""
    return isinstance(last, Started) and process.is_live(last.process)


def _state_of_array(run: RunFolder, tasks: Sequence[RunFolder]) -> tuple[RunState, str]:
    """Return the state of an array of which `tasks` have begun, and a count: finished once all
    tasks are. Raise OSError where a task's journal can't be read."""
    finished = sum(task.finished() for task in tasks)
    try:
        indexes = [task.index for task in tasks]
        total = len(JobSpec.from_json(read_text(run.job_json)).indexes(indexes))
    except (HpcDdpError, OSError, ValueError):  # a broken file of one run must not hide all others
        return RunState.ARRAY, f"{finished} tasks finished; job.json can't be read"
    state = RunState.FINISHED if finished == total else RunState.ARRAY
    return state, f"{finished} of {total} tasks finished"


def _state_of_verdict(verdict: VerdictGiven) -> tuple[RunState, str]:
    """Return the state after a verdict, and its reason; a cause that is no state is lost."""
    if verdict.action == Action.REQUEUE:
        return RunState.STOPPED, f"{verdict.why}; can go on with --run"
    if verdict.action == Action.GIVE_UP:
        return RunState.FAILED, verdict.why
    try:
        return RunState(verdict.cause), verdict.why
    except ValueError:  # a damaged journal
        return RunState.LOST, verdict.why


def _state_of_process(started: Started, events: Sequence[JournalEvent]) -> tuple[RunState, str]:
    """Return the state of a run on a machine, and the reason. A standalone script has no verdict,
    only events."""
    if process.is_live(started.process):
        return RunState.RUNNING, "on this machine"
    if started.backend == "local":
        of_attempt = [event for event in events if event.attempt == started.attempt]
        failed = [event for event in of_attempt if isinstance(event, RankFailed)]
        end = last_event(of_attempt, Stopped, RankFailed)
        if isinstance(end, Stopped):
            source = f" ({end.source})" if end.source else ""
            why = f"{end.reason}{source}, at step {end.step}"
            return RunState.STOPPED, f"{why}; can go on with the same command"
        if failed:
            return RunState.FAILED, f"rank {failed[0].rank}: {failed[0].error}"
    return RunState.LOST, "ended without a word"


# --- what works on a run -------------------------------------------------------------------


@dataclass(frozen=True)
class Queue:
    """The user's jobs by id, and the name of the cluster, '' where that is unknown."""

    jobs: Mapping[str, QueuedJob]
    cluster: str = ""

    @property
    def scripts(self) -> set[str]:
        """The scripts of the jobs that are not over, also of those submitted without hpc-ddp."""
        return {job.script for job in self.jobs.values() if job.state not in OVER}


def jobs_in_queue() -> Mapping[str, QueuedJob]:
    """Return the user's jobs by id; {} without a Slurm, or without an answer."""
    try:
        return slurm.queue()
    except HpcDdpError:
        return {}


def read_queue() -> Queue | None:
    """Ask Slurm for all that `describe_work` needs; None without a Slurm.

    A Slurm that gives no answer is None, too, with a line on stderr.
    """
    if shutil.which("squeue") is None:
        return None
    try:
        cluster = slurm.show_config().get("ClusterName", "")
        return Queue(slurm.queue(), cluster)
    except HpcDdpError as error:
        say(f"{error.message}; runs that have a job are left alone")
        return None


def describe_work(run: RunFolder, queue: Queue | None) -> str:
    """Return the job or process that works on a run, or on a task of its array, or will; or ''.

    Unknown counts as work: a job where there is no Slurm (`queue` None), or a process of another
    machine that has journaled no end. Raise OSError where a journal can't be read.
    """
    for folder in (run, *run.tasks()):
        if work := _describe_work(folder, queue):
            return work
    return ""


def _describe_work(run: RunFolder, queue: Queue | None) -> str:
    """Return the job or process that works on one run, as `describe_work` does."""
    events = run.events()
    jobs = run.job_ids(events)
    if queue is not None:
        if work := _describe_job(run, events, jobs, queue):
            return work
    elif jobs or last_event(events, Started) is None:
        # A run that was only rendered, too: any user may have given its script to sbatch.
        return f"job {jobs[-1] if jobs else '?'}, of a Slurm that can't be asked from here"
    return _describe_process(events)


def _describe_job(
    run: RunFolder, events: list[JournalEvent], jobs: Sequence[str], queue: Queue
) -> str:
    """Return the live job of a run, by its `jobs` (ids), its script or its cluster; '' without one.

    A job of another cluster can't be asked for, and counts as live.
    """
    for job in jobs:
        if job in queue.jobs and queue.jobs[job].state not in OVER:
            return f"job {job}, {queue.jobs[job].state.lower()}"
    if os.path.realpath(run.script) in queue.scripts:  # submitted by sbatch, without hpc-ddp
        return "a job of its script"
    if "(null)" in queue.scripts and not jobs:
        return "perhaps a job whose script came through a pipe"
    last = last_event(events, Queued, Started, VerdictGiven)
    if not isinstance(last, Queued | Started) or not last.cluster or not queue.cluster:
        return ""
    if last.cluster == queue.cluster:
        return ""
    return f"job {last.job_id} of cluster {last.cluster}, which can't be asked from here"


def _describe_process(events: list[JournalEvent]) -> str:
    """Return the process of the newest start where it runs, or may run on another machine; ''
    otherwise."""
    started = last_event(events, Started)
    if started is None or started.pid is None:
        return ""
    name = f"process {started.pid} on {started.host}"
    if process.is_live(started.process):
        return name
    of_attempt = [event for event in events if event.attempt == started.attempt]
    end = last_event(of_attempt, VerdictGiven, Finished, Stopped, RankFailed)
    is_elsewhere = started.host != socket.gethostname()
    return f"{name}, which can't be seen from here" if is_elsewhere and not end else ""
