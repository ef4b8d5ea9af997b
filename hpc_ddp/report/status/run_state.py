"""The state of a run, and whether a job or a process still works on it.

`find_state` checks these conditions, in this order; the first one that applies decides:

1. Does the journal say that the run is finished?              ``finished``
2. Has the user cancelled it?                                  ``cancelled``
3. Has Slurm a live job of it?     ``waiting``, ``starting``, ``running``, ``suspended``, ``ending``
4. Has it tasks, and no process of this machine plays them?    ``finished``, ``array``
5. Was it never submitted?                                     ``rendered``
6. Has its newest attempt a verdict?             ``stopped``, ``failed``, ``cancelled``, ``lost``
7. Does its process run on this machine?                       ``running``
8. Has a standalone script journaled its own end?              ``stopped``, ``failed``
9. None of these                                               ``lost``

Slurm's queue is asked for the user's own jobs. So another user's run is ``unknown`` where the
answer would be lost, or stopped until its next attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_ddp.core import process
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_text
from hpc_ddp.core.file_owners import other_owner
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import Action, Cause, TextEnum
from hpc_ddp.core.journal.events import (
    Finished,
    JournalEvent,
    RankFailed,
    Started,
    Stopped,
    Submitted,
    VerdictGiven,
)
from hpc_ddp.core.journal.journal import is_finished, last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import is_final, process_of
from hpc_ddp.slurm_text import QueuedJob


class RunState(TextEnum):
    """The state of a run, in one word or two; ``not begun`` is only for tasks of an array."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDING = "ending"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    LOST = "lost"
    UNKNOWN = "unknown"
    RENDERED = "rendered"
    ARRAY = "array"
    NOT_BEGUN = "not begun"
    UNREADABLE = "unreadable"

    @property
    def is_live(self) -> bool:
        """Whether the run has a job or a process now: it waits, starts, runs, ends or is
        suspended."""
        return self in _LIVE

    @property
    def is_working(self) -> bool:
        """Whether the run's job has its nodes, or its process runs."""
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


def spec_of(run: RunFolder) -> JobSpec | None:
    """Return a run's job; None where its job.json is missing or broken."""
    try:
        return JobSpec.from_json(read_text(run.job_json))
    except (OSError, ValueError, HpcDdpError):
        return None


def state_of_job(slurm_state: str) -> RunState | None:
    """Return the state of a run by Slurm's state of its job; None where the job is over or was
    preempted, and for an unknown state."""
    return _OF_JOB.get(slurm_state)


def find_state(
    run: RunFolder, events: Sequence[JournalEvent], queued: Sequence[QueuedJob]
) -> tuple[RunState, str]:
    """Return the state of a run, and a reason as text, '' without one. While Slurm has a live job
    of the run, the reason is Slurm's own word for waiting, or else the names of the nodes.

    The module's docstring has the order of the conditions. For another user's run the state may be
    ``unknown``. Raise OSError where the journal of a task of the run can't be read.

    Parameters
    ----------
    events
        the run's journal, by attempt and time
    queued
        the run's jobs that Slurm still has
    """
    state, why = _find_state_of_own(run, events, queued)
    last = last_event(events, Submitted, Started, VerdictGiven)
    goes_on = state is RunState.STOPPED and isinstance(last, VerdictGiven)
    if (state is RunState.LOST or goes_on) and (owner := other_owner(run.path)):
        return RunState.UNKNOWN, f"of {owner}, whose jobs are not looked at"
    return state, why


def _find_state_of_own(
    run: RunFolder, events: Sequence[JournalEvent], queued: Sequence[QueuedJob]
) -> tuple[RunState, str]:
    """Return state and reason as `find_state` does for a run of this user."""
    if is_finished(events):
        verdict = last_event(events, VerdictGiven, Finished)
        return RunState.FINISHED, verdict.why if isinstance(verdict, VerdictGiven) else ""
    job = next((job for job in queued if state_of_job(job.state)), None)
    if run.cancelled.exists():
        is_live = job is not None and _OF_JOB[job.state] is not RunState.ENDING
        return RunState.CANCELLED, f"but its job is {job.state.lower()}" if job and is_live else ""
    last = last_event(events, Submitted, Started, VerdictGiven)
    # The last task of an array has the array's job id, which is live while other tasks run.
    if job and not (run.is_task and _has_final_verdict(last)):
        is_waiting = _OF_JOB[job.state] is RunState.WAITING
        return _OF_JOB[job.state], job.reason if is_waiting else job.nodes
    tasks = run.tasks()
    if tasks and not (isinstance(last, Started) and process.is_live(last.process)):
        return state_of_array(run, tasks)
    if last is None:
        return RunState.RENDERED, "never submitted"
    if isinstance(last, VerdictGiven):
        return _state_of_verdict(last)
    if isinstance(last, Started) and last.pid is not None:
        return _state_of_process(last, events)
    return RunState.LOST, next((job.state.lower() for job in queued), "gone from the queue")


def _has_final_verdict(last: JournalEvent | None) -> bool:
    """Return whether a task's last event is a verdict that no further attempt follows; False for
    None."""
    return isinstance(last, VerdictGiven) and is_final(last)


def state_of_array(run: RunFolder, tasks: Sequence[RunFolder]) -> tuple[RunState, str]:
    """Return the state of an array of which `tasks` have begun, and a text on how many are
    finished. The state is ``finished`` once all tasks of the array are, else ``array``, also where
    job.json is broken. Raise OSError where a task's journal can't be read."""
    finished = sum(task.finished() for task in tasks)
    try:
        indexes = [task.index for task in tasks]
        total = len(JobSpec.from_json(read_text(run.job_json)).indexes(indexes))
    except (HpcDdpError, OSError, ValueError):  # a broken file of one run must not hide all others
        return RunState.ARRAY, f"{finished} tasks finished; job.json can't be read"
    state = RunState.FINISHED if finished == total else RunState.ARRAY
    return state, f"{finished} of {total} tasks finished"


def _state_of_verdict(verdict: VerdictGiven) -> tuple[RunState, str]:
    """Return the state of a run whose last event is a verdict, and the reason. The state is
    ``stopped`` where the run can go on, ``failed`` where it was given up, ``lost`` after a
    superseded attempt, else the verdict's cause, or ``lost`` for a cause that is no state."""
    if verdict.action == Action.REQUEUE:
        return RunState.STOPPED, f"{verdict.why}; can go on with --run"
    if verdict.action == Action.GIVE_UP:
        return RunState.FAILED, verdict.why
    if verdict.cause == Cause.SUPERSEDED:  # and Slurm has no job of the run any more
        return RunState.LOST, "its job was started again, and ended before the next attempt began"
    try:
        return RunState(verdict.cause), verdict.why
    except ValueError:  # a damaged journal
        return RunState.LOST, verdict.why


def _state_of_process(started: Started, events: Sequence[JournalEvent]) -> tuple[RunState, str]:
    """Return the state of a run that is played by a process and not by a job, and the reason. The
    state is ``running`` while the process lives; for a standalone script ``stopped`` or ``failed``
    by its events, since it has no verdict; ``unknown`` where the process can't be seen from here;
    else ``lost``."""
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
    if work := process_of(events):
        return RunState.UNKNOWN, work.text
    return RunState.LOST, "ended without a word"
