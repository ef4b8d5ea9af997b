"""Ends runs for good. A job that is still live afterwards is reported as not cancelled."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpc_ddp import slurm
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import write_json
from hpc_ddp.core.file_owners import check_executable
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.journal.events import Cancelled, JournalEvent, Started, Submitted, VerdictGiven
from hpc_ddp.core.journal.journal import is_finished, last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import (
    Life,
    Queue,
    describe_job,
    describe_work,
    ended_jobs,
    has_ended_for_good,
    is_of_another_run,
    process_of,
    read_queue,
)
from hpc_ddp.report.status.run_state import RunState, state_of_array
from hpc_ddp.slurm_text import QueuedJob

QUEUE_LOOKS = 10  # at the queue after a scancel, a second apart


def cancel(run: RunFolder) -> None:
    """End a run for good, an array with all tasks, a task alone: send SIGTERM to its processes on
    this machine, cancel its jobs, and wait up to `QUEUE_LOOKS` seconds for the jobs' end.

    Before that the run and its tasks get the mark ``cancelled`` and an event in their journals, so
    that a verdict made just now sees the mark. A disk that takes no mark is reported on stderr, and
    the jobs are cancelled all the same. A finished run whose script has not ended (it hangs, say)
    gets no mark, and stays finished; a finished task of an array is passed over.

    Raises
    ------
    UsageError
        the run is finished and nothing works on it, or another user could have written the ids of
        its processes and jobs
    HpcDdpError
        Slurm gives no answer or refuses, and jobs may be live. Or, once all other jobs are
        cancelled: a job is live after the wait, a job may be another run's, or a job or process
        can't be asked for from here
    OSError
        the run's folder or a task's can't be read or looked at; no job is cancelled then, but
        processes may have got SIGTERM
    """
    check_executable(run)
    is_done = _is_finished_but_live(run)
    tasks = (task for task in run.tasks() if not task.finished())
    parts = [_end_part(folder, is_done) for folder in itertools.chain([run], tasks)]
    jobs = [job for part in parts for job in part.jobs]
    ended = [job for part in parts for job in part.ended_jobs]
    problems = [part.problem for part in parts if part.problem]
    if run.is_task:
        jobs = _jobs_of_task(run, jobs)
    queue = Queue(slurm.list_jobs(is_patient=True)) if jobs else read_queue()
    targets, job_problems = _select_targets(run, jobs, ended, queue)
    problems += job_problems
    if not run.is_task:
        targets += _unjournaled_jobs(run, targets, queue)
    if targets:
        problems += _cancel_jobs(run, targets, all(part.is_marked for part in parts))
    if problems:
        raise HpcDdpError(
            f"of run {run.path} not cancelled: {'; '.join(problems)}",
            hint="scancel, or kill, where it is",
        )


def _is_finished_but_live(run: RunFolder) -> bool:
    """Return whether a run is finished, and its job or process has not ended, or may not have: its
    cluster gives no answer, or the process is on another machine. Slurm is asked only where the
    journal of a finished run does not prove that all is over. Raise UsageError for a finished run
    on which nothing works, OSError where a journal can't be read."""
    events = run.events()
    tasks = run.tasks()
    is_finished_array = bool(tasks) and state_of_array(run, tasks)[0] is RunState.FINISHED
    if not is_finished(events) and not is_finished_array:
        return False
    if has_ended_for_good(events) or describe_work(run, read_queue(), guesses=False) is None:
        raise UsageError(f"run {run.path} is finished", hint=f"hpc-ddp status {run.quoted}")
    return True


@dataclass(frozen=True)
class _Part:
    """A run or a task after `_end_part`: its jobs by the journal, and those of them that are over;
    whether it needs no mark or has it; and a sentence about a process that can't be seen from here,
    '' without one."""

    jobs: Sequence[JobRef]
    ended_jobs: Sequence[JobRef]
    is_marked: bool
    problem: str


def _end_part(folder: RunFolder, is_done: bool) -> _Part:
    """Write the mark of a run or a task, unless it `is_done`, and send SIGTERM to its process on
    this machine. Raise OSError where the journal can't be read."""
    events = folder.events()
    jobs = folder.jobs(events)
    is_marked = is_done or _write_mark(folder, jobs)
    return _Part(jobs, ended_jobs(folder, events), is_marked, _end_process(events))


def _end_process(events: Sequence[JournalEvent]) -> str:
    """Send SIGTERM to the process of the newest start, if it runs on this machine. Return a
    sentence about a process that can't be seen from here, else ''."""
    started, work = last_event(events, Started), process_of(events)
    if started and started.pid and work and work.life is Life.LIVE:
        with suppress(ProcessLookupError):  # it has ended just now
            os.kill(started.pid, signal.SIGTERM)
        return ""
    return work.text if work else ""


def _cancel_jobs(run: RunFolder, jobs: Sequence[JobRef], is_marked: bool) -> list[str]:
    """Cancel a run's jobs, one or more, and wait for their end, `QUEUE_LOOKS` seconds at most;
    return a sentence about each job that is live then.

    A verdict sees the run's mark and requeues no job. If the run has none (not `is_marked`), Slurm
    is asked not to requeue the jobs; a refusal of this is passed over. Raise HpcDdpError where
    Slurm gives no answer or does not cancel the jobs, and OSError where a run's folder can't be
    looked at.
    """
    if not is_marked:
        for job in jobs:
            with suppress(HpcDdpError):
                slurm.forbid_requeue(job)
    slurm.cancel(jobs)
    for _ in range(QUEUE_LOOKS):
        queue = Queue(slurm.list_jobs())
        live = [job for job in jobs if queue.life(job, run) is Life.LIVE]
        if not live:
            break
        time.sleep(1)
    return [f"{describe_job(job, queue, run)} after scancel" for job in live]


def _write_mark(folder: RunFolder, jobs: Sequence[JobRef]) -> bool:
    """Write a run's mark `cancelled`, with its `jobs`, and the event into its journal; return
    whether the disk has taken the mark. If it has not, that is reported on stderr, and nothing is
    journaled.

    The mark names `jobs`, since the first start of any other job removes the mark: the user then
    wishes to go on.
    """
    try:
        write_json(folder.cancelled, {"jobs": [str(job) for job in jobs]})
    except OSError as error:
        say(f"{folder.path} can't be marked as cancelled: {error.strerror}; its jobs are cancelled")
        return False
    folder.journal("submit").write(Cancelled())
    return True


def _select_targets(
    run: RunFolder, jobs: Sequence[JobRef], ended: Sequence[JobRef], queue: Queue
) -> tuple[list[JobRef], list[str]]:
    """Return those of `jobs`, the journal's, that are to be cancelled; and sentences about those
    that may be another run's by now, or can't be asked for.

    `ended` are the jobs that are over by the journal. A journal may name a job of long ago, whose
    number another job of the user's has now. Allocations (``salloc``) are returned only while the
    newest attempt has no verdict. Raise HpcDdpError where Slurm gives no answer on a job, and
    OSError where the journal can't be read.
    """
    targets, problems = [], []
    paths, events = _Paths.of(run), run.events() if jobs else []
    submitted = last_event(events, Submitted)
    is_allocation = submitted is not None and submitted.backend == "salloc"
    has_stopped = isinstance(last_event(events, Started, VerdictGiven), VerdictGiven)
    for job in jobs:
        queued = queue.find(job, run)
        if queued and queue.life(job, run) is not Life.OVER:
            if is_allocation:
                if not has_stopped:
                    targets.append(job)
            elif _is_of_run(paths, job, queued):
                targets.append(job)
            else:
                problems.append(
                    f"job {job.id} is live, and perhaps not of this run ({queued.name})"
                )
        elif queue.life(job, run) is Life.UNKNOWN and not job.is_among(ended):
            problems.append(
                f"job {job.id} of cluster {job.cluster}, which can't be asked from here"
            )
    return targets, problems


def _unjournaled_jobs(run: RunFolder, targets: Sequence[JobRef], queue: Queue) -> list[JobRef]:
    """Return the live jobs of a run, no task, that are not among `targets`: a job that the user has
    submitted without hpc-ddp, and that has not started, is not in the journal. Raise HpcDdpError
    where Slurm gives no answer on a job, and OSError where a run's folder can't be looked at."""
    paths = _Paths.of(run)
    jobs: list[JobRef] = []
    for job_id, queued in queue.live.items():
        job = JobRef(job_id)
        if not job.is_among(targets) and (
            queued.script in paths.scripts
            or (_has_name_of(run, queued) and _is_of_run(paths, job, queued))
        ):
            jobs.append(job)
    return jobs


def _has_name_of(run: RunFolder, queued: QueuedJob) -> bool:
    """Return whether a job has the run's name, or a name that is the run's up to a dash, and does
    not have the script of another run. Raise OSError where a run's folder can't be looked at."""
    # A run is named NAME-USER, and its job NAME, where another user has runs of that name.
    has_name = queued.name == run.name or run.name.startswith(f"{queued.name}-")
    return has_name and not is_of_another_run(run, queued.script)


@dataclass(frozen=True)
class _Paths:
    """The scripts, and the folders for output, of a run, of its array, and of its tasks: each of
    these may have a job of its own. The paths are without links, as Slurm has them."""

    scripts: frozenset[str]
    logs: frozenset[str]

    @classmethod
    def of(cls, run: RunFolder) -> _Paths:
        """Return the paths for a run. Raise OSError where the tasks can't be listed."""
        parts = (run, RunFolder(run.whole), *run.tasks())
        scripts = frozenset(os.path.realpath(part.script) for part in parts)
        return cls(scripts, frozenset(os.path.realpath(part.logs) for part in parts))


def _is_of_run(paths: _Paths, job: JobRef, queued: QueuedJob) -> bool:
    """Return whether a live job belongs to the run with `paths`: it has the run's script, or, by
    Slurm's record, prints into the run's folder (its script may be a copy, or have come through a
    pipe). False for a job that Slurm has forgotten since `queued` was read.

    Raise HpcDdpError where Slurm gives no answer.
    """
    if queued.script in paths.scripts:
        return True
    try:
        record = slurm.show_job(job)
    except slurm.UnknownJobError:
        return False
    return os.path.dirname(os.path.realpath(record.output or "/")) in paths.logs


def _jobs_of_task(task: RunFolder, jobs: Sequence[JobRef]) -> list[JobRef]:
    """Return jobs that stand for this task alone: the task's part of each job of the array, and
    those of the task's own `jobs` that are no jobs of the array. The last task of an array has the
    array's job id, by which all tasks would be cancelled. Raise OSError where the array's journal
    can't be read."""
    array = RunFolder(task.whole)
    array_jobs = array.jobs(array.events())
    task_jobs = [job.task(task.index) for job in array_jobs]
    return [*task_jobs, *(job for job in jobs if not job.is_among(array_jobs))]
