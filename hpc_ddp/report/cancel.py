"""Ends runs for good. What is still live afterwards is never called cancelled."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from hpc_ddp import slurm
from hpc_ddp.core import process
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import write_json
from hpc_ddp.core.file_owners import check_executable
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.journal.events import Cancelled, Started, Submitted
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.liveness import Life, Queue, ended_jobs, read_queue
from hpc_ddp.slurm_text import QueuedJob


def cancel(run: RunFolder) -> None:
    """End a run for good. The mark comes first, so that a verdict made just now sees it.

    A disk that takes no mark is reported, and the jobs are cancelled all the same.

    Raises
    ------
    UsageError
        the run is finished, or another user could have written the ids of its processes and jobs
    HpcDdpError
        Slurm gives no answer or does not cancel its jobs, or one is live and not known to be its;
        all others are cancelled then
    OSError
        the run's folder can't be read
    """
    check_executable(run)
    if run.finished():
        raise UsageError(f"run {run.path} is finished", hint=f"hpc-ddp status {run.id}")
    jobs: list[JobRef] = []
    ended: list[JobRef] = []
    is_marked = True
    for folder in (run, *run.tasks()):
        if folder.finished():
            continue
        events = folder.events()
        jobs += folder.jobs(events)
        ended += ended_jobs(folder, events)
        is_marked &= _mark(folder, folder.jobs(events))
        started = last_event(events, Started)
        if started and started.pid and process.is_live(started.process):
            os.kill(started.pid, signal.SIGTERM)
    if run.is_task:
        jobs = _jobs_of_task(run, jobs)
    queue = Queue(slurm.queue()) if jobs else read_queue()
    targets, unclear = _live_jobs(run, jobs, ended, queue)
    if not is_marked:
        for job in targets:
            with suppress(HpcDdpError):
                slurm.forbid_requeue(job)
    if targets:
        slurm.cancel(targets)
    if unclear:
        raise HpcDdpError(
            f"of run {run.path} not cancelled: {'; '.join(unclear)}", hint="scancel, where it is"
        )


def _mark(folder: RunFolder, jobs: Sequence[JobRef]) -> bool:
    """Note in a run's folder that it is cancelled; return whether the disk has taken it, and else
    report it.

    A first start of a job that the mark does not name is a wish to go on, and removes it.
    """
    try:
        write_json(folder.cancelled, {"jobs": [str(job) for job in jobs]})
    except OSError as error:
        say(f"{folder.path} can't be marked as cancelled: {error.strerror}; its jobs are cancelled")
        return False
    folder.journal("submit").write(Cancelled())
    return True


def _live_jobs(
    run: RunFolder, jobs: Sequence[JobRef], ended: Sequence[JobRef], queue: Queue
) -> tuple[list[JobRef], list[str]]:
    """Return the run's jobs that are not over, and sentences about those of its journal that may
    be another run's by now, or can't be asked for.

    `jobs` are the journal's, `ended` those of them that are over by it. A journal may name a job of
    long ago, whose number is that of another job of the user's now; and it does not name one that a
    person has submitted without hpc-ddp, which waits. Raise HpcDdpError without an answer of
    Slurm's.
    """
    targets, unclear = [], []
    for job in jobs:
        queued = queue.find(job)
        if queued and queue.life(job) is not Life.OVER:
            if _is_of_run(run, job, queued):
                targets.append(job)
            else:
                unclear.append(f"job {job.id} is live, and perhaps not of this run ({queued.name})")
        elif queue.life(job) is Life.UNKNOWN and not job.is_among(ended):
            unclear.append(f"job {job.id} of cluster {job.cluster}, which can't be asked from here")
    for job_id, queued in {} if run.is_task else queue.live.items():
        job = JobRef(job_id)
        if not job.is_among(jobs) and _may_be_of_run(run, queued) and _is_of_run(run, job, queued):
            targets.append(job)
    return targets, unclear


def _may_be_of_run(run: RunFolder, queued: QueuedJob) -> bool:
    """Return whether a job that the journal does not name is worth a question to Slurm."""
    name = run.name
    is_namesake = queued.name == name or name.startswith(f"{queued.name}-")  # NAME-USER
    return _has_script(run, queued) or is_namesake


def _has_script(run: RunFolder, queued: QueuedJob) -> bool:
    """Return whether a job was submitted with the script of a run, or of its array."""
    return queued.script in {os.path.realpath(part.script) for part in _parts(run)}


def _is_of_run(run: RunFolder, job: JobRef, queued: QueuedJob) -> bool:
    """Return whether a live job is the run's: it has its script, prints into its folder (a copy of
    the script, or one that came through a pipe), or is the allocation that the run found itself in.

    Raise HpcDdpError where Slurm gives no answer.
    """
    submitted = last_event(run.events(), Submitted)
    if _has_script(run, queued) or (submitted is not None and submitted.backend == "salloc"):
        return True
    folder = os.path.dirname(os.path.realpath(slurm.show_job(job).output or "/"))
    return folder in {os.path.realpath(part.logs) for part in _parts(run)}


def _parts(run: RunFolder) -> tuple[RunFolder, RunFolder]:
    return run, RunFolder(run.whole)


def _jobs_of_task(task: RunFolder, jobs: Sequence[JobRef]) -> list[JobRef]:
    """Return jobs that mean this task only, of the task's own `jobs` and the array's: the last task
    of an array has the array's id."""
    array = RunFolder(task.whole)
    array_jobs = array.jobs(array.events())
    task_jobs = [JobRef(f"{job.id}_{task.index}", job.cluster) for job in array_jobs]
    return [*task_jobs, *(job for job in jobs if not job.is_among(array_jobs))]
