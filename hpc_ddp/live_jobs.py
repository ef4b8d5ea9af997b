"""Tells whether a job or a process works on a run, and whether the run may be started.

All of hpc-ddp asks here: `Queue.life` for a job, `describe_work` for a run. A job or process that
can't be asked for from here may be live: nothing is started or deleted in spite of it.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.core import process
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.journal.enums import Action, Cause, TextEnum
from hpc_ddp.core.journal.events import (
    Dismissed,
    Finished,
    JournalEvent,
    RankFailed,
    Started,
    Stopped,
    Submitted,
    VerdictGiven,
)
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.slurm_text import HAS_NO_NODES, OVER, QueuedJob


class Life(TextEnum):
    """The life of a job, as its cluster tells."""

    LIVE = "live"
    OVER = "over"
    UNKNOWN = "unknown"  # its cluster can't be asked from here, or it is ending, or preempted


class Queue:
    """The user's jobs as squeue shows them. Another cluster than this one is asked once, when a job
    of it is first looked for; no method raises an error of Slurm's.

    Parameters
    ----------
    jobs
        the jobs of this cluster by id; None where Slurm can't be asked
    cluster
        this cluster as `JobRef` has it, '' where Slurm does not say; None: it is asked when needed
    problem
        why Slurm can't be asked, '' where there is no Slurm client
    """

    def __init__(
        self, jobs: Mapping[str, QueuedJob] | None, cluster: str | None = None, problem: str = ""
    ) -> None:
        self.jobs, self._cluster, self.problem = jobs, cluster, problem
        self._others: dict[str, Mapping[str, QueuedJob] | None] = {}  # `jobs` of other clusters

    @property
    def cluster(self) -> str:
        """This cluster as `JobRef` has it, '' where Slurm does not say. The first use may ask
        Slurm."""
        if self._cluster is None:
            self._cluster = "" if self.jobs is None else slurm.own_cluster()
        return self._cluster

    def find(self, job: JobRef, run: RunFolder) -> QueuedJob | None:
        """Return Slurm's line of a job of `run`; for a task that waits, the line of all waiting
        tasks. None without one, where the job's cluster can't be asked, and where the line is that
        of another run's job: a cluster that is set up anew begins its numbers anew. Raise OSError
        where a run's folder can't be looked at, and UsageError where Slurm's list of an array's
        waiting tasks can't be parsed."""
        jobs = self._jobs_of(job) or {}
        array, is_task, index = job.id.partition("_")  # is_task: "_", or "" for a whole job
        queued = jobs.get(job.id)
        if is_task and not queued:
            lines = (line for line in jobs.values() if line.has_task(array, int(index)))
            queued = next(lines, None)
        return None if queued and is_of_another_run(run, queued.script) else queued

    def life(self, job: JobRef, run: RunFolder) -> Life:
        """Return whether a job of a run is live; OVER where its cluster does not know the job.
        UNKNOWN where its cluster can't be asked, where another cluster of the same name may have
        it, and for a job that is ending or preempted. Raise OSError and UsageError where `find`
        does."""
        if self._jobs_of(job) is None:
            return Life.UNKNOWN
        queued = self.find(job, run)
        if queued is None:  # another cluster of this name may have it
            return Life.UNKNOWN if job.cluster and job.is_of_namesake(self.cluster) else Life.OVER
        if queued.state in OVER:
            return Life.OVER
        return Life.UNKNOWN if queued.state in ("COMPLETING", "PREEMPTED") else Life.LIVE

    @property
    def live(self) -> dict[str, QueuedJob]:
        """The jobs of this cluster that are not over, by id; {} where Slurm can't be asked."""
        return {id: job for id, job in (self.jobs or {}).items() if job.state not in OVER}

    def _jobs_of(self, job: JobRef) -> Mapping[str, QueuedJob] | None:
        """Return the user's jobs on the cluster of `job` (this one, where the job names none), by
        id; None where that cluster can't be asked. Another cluster is asked the first time only."""
        name = job.cluster_name
        if self.jobs is None or not name or name == JobRef("", self.cluster).cluster_name:
            return self.jobs
        if name not in self._others:
            try:
                self._others[name] = slurm.list_jobs(name)
            except HpcDdpError:
                self._others[name] = None
        return self._others[name]


def is_of_another_run(run: RunFolder, script: str) -> bool:
    """Return whether `script`, the path of a job's script, belongs to another run than `run`, its
    array and its tasks. False where the script, or a ``job.json`` beside it, is not here or can't
    be looked at, and for a script of another name than runs' scripts have: a site's sbatch may
    submit a copy. Raise OSError where the folder of one of the runs can't be looked at."""
    path = Path(script)
    if path.name != run.script.name or not os.path.isfile(path):
        return False
    if not os.path.isfile(path.with_name(run.job_json.name)):
        return False
    # An array owns the scripts of its tasks; a task owns no script of another task.
    folders = [path.parent] if run.is_task else [path.parent, RunFolder(path.parent).whole]
    return not any(folder.samefile(part) for folder in folders for part in (run.path, run.whole))


def read_queue() -> Queue:
    """Ask Slurm once for the user's jobs, and return them. Without an answer the queue's `jobs` are
    None and its `problem` is the reason, '' on a machine without squeue. No error is raised."""
    if shutil.which("squeue") is None:
        return Queue(None)
    try:
        return Queue(slurm.list_jobs())
    except HpcDdpError as error:
        return Queue(None, problem=error.message)


# --- what works on a run -------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A job or a process that works on a run, or may. `text` names it in words; `job` is None for a
    process, and for a job whose id is not known."""

    text: str
    life: Life
    job: JobRef | None = None

    def __str__(self) -> str:
        return self.text


def describe_work(
    run: RunFolder, queue: Queue, besides: JobRef | None = None, guesses: bool = True
) -> Work | None:
    """Return the first job or process that works on a run or on one of its tasks, or will; None
    where there is none. For a task the live job of its array that has the task counts, too.

    A job whose cluster can't be asked, or a process of another machine, counts too, with
    `Life.UNKNOWN`, unless the journal has its end. The job `besides` does not count, unless another
    shell of it works on the run. With `guesses` two more count: a job that may have been submitted
    without hpc-ddp, for a run that has had no job; and, where this cluster can't be asked, a job
    whose end the journal has. Raise OSError where a journal can't be read, and what `Queue.find`
    raises.
    """
    works = (_work_on(part, queue, besides, guesses) for part in (run, *run.tasks()))
    work = next(filter(None, works), None)
    return work or (_job_of_array(run, queue) if run.is_task else None)


def has_ended_for_good(events: Sequence[JournalEvent]) -> bool:
    """Return whether the journal of a finished run, `events`, proves that nothing of hpc-ddp works
    on the run any more: the newest attempt has a verdict or was started by hand, or the last submit
    was inside an allocation (``salloc``). A process by hand, or an allocation, may go on without
    it."""
    last = last_event(events, Started, VerdictGiven)
    is_plain = isinstance(last, Started) and last.backend == "local"
    submitted = last_event(events, Submitted)
    in_allocation = submitted is not None and submitted.backend == "salloc"
    return isinstance(last, VerdictGiven) or is_plain or in_allocation


def _job_of_array(task: RunFolder, queue: Queue) -> Work | None:
    """Return the live job of a task's array that works on the task, or will; None without one.
    Raise OSError where the array's journal can't be read, and what `Queue.find` raises."""
    array = RunFolder(task.whole)
    for array_job in array.jobs(array.events()):
        job = array_job.task(task.index)
        if queue.life(job, task) is Life.LIVE:
            return Work(describe_job(job, queue, task), Life.LIVE, job)
    return None


def _work_on(run: RunFolder, queue: Queue, besides: JobRef | None, guesses: bool) -> Work | None:
    """Return the job or process that works on one run itself, not on its tasks; None where there is
    none. `besides`, `guesses` and the errors are those of `describe_work`."""
    events = run.events()
    jobs = run.jobs(events)
    # Without Slurm's answer a guess does not rely on the ends in the journal.
    ended = [] if guesses and queue.jobs is None else ended_jobs(run, events)
    for job in jobs:
        if besides and job.is_same(besides):
            attempts = run.attempts()
            if attempts and process.is_live(attempts[-1].info.get("shell", {})):
                return Work(f"another shell of job {job.id}", Life.LIVE, job)
            continue
        life = queue.life(job, run)
        if life is not Life.OVER and _has_left_allocation(run, events, job):
            continue
        # The last task of an array has the array's id, which is live with any of its tasks.
        is_over = job.is_among(ended) and (run.is_task or life is Life.UNKNOWN)
        if life is not Life.OVER and not is_over:
            return Work(describe_job(job, queue, run), life, job)
    return _unnamed_job(run, queue, events, guesses and not jobs) or process_of(events)


def _unnamed_job(
    run: RunFolder, queue: Queue, events: Sequence[JournalEvent], guesses: bool
) -> Work | None:
    """Return a live job of the run's script, which its journal, `events`, need not name; None
    without one. With `guesses`, for a run without known jobs (not checked here), one more may be
    its, of `Life.UNKNOWN`: any, if the cluster can't be asked, or one whose script was piped in."""
    scripts = {job.script for job in queue.live.values()}
    if os.path.realpath(run.script) in scripts:
        return Work("a job of its script", Life.LIVE)
    if guesses and queue.jobs is None and last_event(events, Started) is None:
        # A run that was only rendered: any user may have given its script to sbatch.
        return Work("perhaps a job of a Slurm that can't be asked from here", Life.UNKNOWN)
    if guesses and "(null)" in scripts:
        return Work("perhaps a job whose script came through a pipe", Life.UNKNOWN)
    return None


def _has_left_allocation(run: RunFolder, events: Sequence[JournalEvent], job: JobRef) -> bool:
    """Return whether the run's newest attempt was in the allocation (``salloc``) `job` and has its
    verdict: the allocation may be open for other work. Raise OSError as `RunFolder.attempts`."""
    attempts = run.attempts()
    info = attempts[-1].info if attempts else {}
    holder = JobRef.of(info.get("job_id"), info.get("cluster"))
    return holder is not None and holder.is_same(job) and _has_left_shell(events, info)


def describe_job(job: JobRef, queue: Queue, run: RunFolder) -> str:
    """Return words for a job, not over, of a run: its state, or why that is not known.
    Raises what `Queue.find` raises."""
    queued = queue.find(job, run)
    if queued:
        return f"job {job.id}, {queued.state.lower()}"
    where = f"of cluster {job.cluster}" if job.cluster else "of a Slurm"
    return f"job {job.id} {where}, which can't be asked from here"


def ended_jobs(run: RunFolder, events: Sequence[JournalEvent]) -> list[JobRef]:
    """Return the jobs of a run that are over by its journal, `events`: those that the user has
    called over (`Dismissed`); and those on whose last attempt the verdict `is_final`, each with the
    next job of a chain that it has queued."""
    ended = [JobRef(e.job_id, e.cluster or "") for e in events if isinstance(e, Dismissed)]
    verdicts = {event.attempt: event for event in events if isinstance(event, VerdictGiven)}
    starts = {event.attempt: event for event in events if isinstance(event, Started)}
    attempt_of = {JobRef.of(s.job_id, s.cluster): n for n, s in starts.items()}  # its last one
    for job, number in attempt_of.items():
        verdict = verdicts.get(number)
        if job and verdict and is_final(verdict):
            ended += [job, *filter(None, [run.attempt(number).link])]
    return ended


def is_final(verdict: VerdictGiven) -> bool:
    """Return whether, after this verdict, another attempt begins only if the user starts it."""
    return verdict.action != Action.REQUEUE and verdict.cause != Cause.SUPERSEDED


def process_of(events: Sequence[JournalEvent]) -> Work | None:
    """Return the process of the newest start, where the process runs, or may run on another machine
    and has journaled no end. Return None otherwise, and for a start by a job."""
    started = last_event(events, Started)
    if started is None or started.pid is None:
        return None
    name = f"process {started.pid} on {started.host}"
    if process.is_live(started.process):
        return Work(name, Life.LIVE)
    of_attempt = [event for event in events if event.attempt == started.attempt]
    end = last_event(of_attempt, VerdictGiven, Finished, Stopped, RankFailed)
    if end or started.host == socket.gethostname():
        return None
    return Work(f"{name}, which can't be seen from here", Life.UNKNOWN)


# --- before a start ------------------------------------------------------------------------


def _dismiss_unknown_jobs(run: RunFolder, queue: Queue) -> None:
    """Journal `Dismissed`, the user's word that a job is over, for each job of the run and of its
    tasks whose life is unknown. Raise OSError where a journal can't be read."""
    for part in (run, *run.tasks()):
        for job in part.jobs(part.events()):
            if queue.life(job, part) is Life.UNKNOWN:
                part.journal("submit").write(Dismissed(job.id, job.cluster or None))


def check_idle(run: RunFolder, is_forced: bool = False) -> None:
    """Raise UsageError if a job or process works on the run or on a task of it, or may: two would
    write over each other. The job in which this process runs (SLURM_JOB_ID) does not count.

    With `is_forced` a job or process that only may work on the run does not count either, and
    `Dismissed` is journaled first for each job whose life is unknown, also where this then raises.
    Where squeue is installed and gives no answer, `is_forced` has no effect.

    Raises
    ------
    UsageError
        see above; or Slurm's list of an array's waiting tasks can't be parsed
    OSError
        the run's journal can't be read, or a run's folder can't be looked at
    """
    own_job = JobRef.of(os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_CLUSTER_NAME"))
    queue = read_queue()
    is_silent = queue.jobs is None and shutil.which("squeue") is not None
    if is_forced and not is_silent:
        _dismiss_unknown_jobs(run, queue)
    work = describe_work(run, queue, besides=own_job, guesses=False)
    if work is None:
        return
    if work.life is Life.LIVE:
        raise UsageError(f"run {run.path} is at work: {work}", hint=f"hpc-ddp cancel {run.quoted}")
    if is_silent or not is_forced:
        again = "the same command again, once Slurm answers"
        force = "look there: hpc-ddp status; if that job is over for good, add --force"
        hint = again if is_silent else force
        raise UsageError(f"run {run.path} may be at work: {work}", hint=hint)


def _has_verdict(events: Sequence[JournalEvent], info: Mapping[str, Any]) -> bool:
    """Return whether the attempt that `info` (its attempt.json) describes has a verdict among a
    run's `events`. The attempt's shell gives the verdict as its last act: it is over then, even if
    the controller has moved since."""
    start = info.get("job_id"), info.get("restarts")
    starts = [e for e in events if isinstance(e, Started) and (e.job_id, e.restarts) == start]
    newest = max((event.attempt for event in starts), default=None)
    return any(isinstance(event, VerdictGiven) and event.attempt == newest for event in events)


def _has_left_shell(events: Sequence[JournalEvent], info: Mapping[str, Any]) -> bool:
    """Return whether the attempt that `info` (its attempt.json) describes was in a shell of an
    allocation, and has its verdict among a run's `events`."""
    return "shell" in info and _has_verdict(events, info)


def is_attempt_live(run: RunFolder, own_job: JobRef, info: Mapping[str, Any]) -> bool:
    """Return whether the attempt of `run` that `info` (its attempt.json) describes still runs.

    The caller is a start of the job `own_job`. An earlier start of that job is over, except in an
    allocation (``salloc``) while its shell runs. An attempt without a job, by hand, is over when
    its process is. Any other attempt is over if the controller does not know its job, or has
    restarted it since, or if the job is on another cluster and over by the journal. A silent
    controller of this cluster is asked without end.

    Raises
    ------
    HpcDdpError
        Slurm refuses, another cluster gives no answer, or the job may be one of another cluster of
        this one's name, which can't be asked from here
    OSError
        the journal can't be read, or the script of the attempt's job can't be looked at
    """
    holder = JobRef.of(info.get("job_id"), info.get("cluster"))
    if holder is None:
        return process.is_live({**info})  # a start by hand: `info` is its process's identity
    if holder.is_same(own_job):  # an earlier start of it, or another shell in an allocation
        return process.is_live(info.get("shell", {}))
    events = run.events()
    if _has_left_shell(events, info):
        return False  # its allocation may be open yet
    is_here = holder.is_of(own_job.cluster)
    if holder.is_among(ended_jobs(run, events)) and not is_here:
        return False
    give_up = math.inf if is_here else None  # no answer does not say that it is over
    try:
        job = slurm.show_job(holder.id if is_here else holder, give_up)
    except slurm.UnknownJobError:
        is_namesakes = holder.is_of_namesake(own_job.cluster)
        if is_namesakes and not _has_verdict(run.events(), info):
            raise HpcDdpError(
                f"job {holder.id} of cluster {holder.cluster} may run {run.path}, and can't be"
                " asked from here",
                hint=f"if it is over: hpc-ddp submit --force --run {run.quoted}",
            ) from None
        return False
    is_running = job.state not in HAS_NO_NODES and job.restarts == info.get("restarts")
    return is_running and not is_of_another_run(run, job.script)
