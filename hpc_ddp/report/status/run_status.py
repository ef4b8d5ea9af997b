"""One line of ``hpc-ddp status``: what a run's journal and Slurm's queue report of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.core import process
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import write_json
from hpc_ddp.core.file_owners import check_executable
from hpc_ddp.core.job.slurm_values import parse_time
from hpc_ddp.core.journal import goodput
from hpc_ddp.core.journal.events import (
    Cancelled,
    CheckpointSaved,
    Finished,
    FirstStep,
    JournalEvent,
    MetricsLine,
    Rerun,
    Started,
    Submitted,
    WorkerStarted,
)
from hpc_ddp.core.journal.journal import last_event, last_step, read_briefly
from hpc_ddp.core.journal.stragglers import slow_rank
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.explain.patterns import explain_pending
from hpc_ddp.report.status.state import RunState, find_state
from hpc_ddp.slurm_text import OVER, QueuedJob


@dataclass(frozen=True)
class Status:
    """One run. `state` and `why` are in plain words.

    Attributes
    ----------
    attempt, nodes
        the newest start, from 0, and the number of its nodes
    step, total_steps, loss, samples_per_s
        the newest ones in the journal
    last_checkpoint_s
        the age of the newest one, in seconds
    time_left_s, eta_s
        of a run that is running: seconds to its attempt's time limit, and to its last step at the
        pace of this attempt
    goodput, seconds
        from 0 to 1, and the parts of the wall time (see `hpc_ddp.core.journal.goodput`)
    reason
        Slurm's own word for why it waits
    slow
        the rank that the others wait for, '' without one (see `hpc_ddp.core.journal.stragglers`)
    results
        the results that the script passed to ``run.finish``
    rerun_of
        the folder of the run that it repeats
    """

    run: str
    name: str
    id: str
    state: RunState
    job_id: str | None
    attempt: int | None
    nodes: int | None
    step: int | None
    total_steps: int | None
    loss: float | None
    samples_per_s: float | None
    last_checkpoint_s: float | None
    time_left_s: float | None
    eta_s: float | None
    goodput: float | None
    seconds: dict[str, float]
    why: str
    reason: str
    slow: str
    results: dict[str, float | None]
    rerun_of: str | None = None

    @property
    def progress(self) -> str | None:
        """The step, as ``400/1000`` or ``400``; None without one."""
        if self.step is None:
            return None
        return f"{self.step}/{self.total_steps}" if self.total_steps else str(self.step)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def status_of(run: RunFolder, queue: Mapping[str, QueuedJob]) -> Status:
    """Return the status of one run; `queue` has the user's jobs in Slurm, by job id. Raise OSError
    where its journal can't be read."""
    events = read_briefly(run.journal_folder)
    return summarize(run, events, run.job_ids(events), queue)


def unreadable(run: RunFolder, why: str) -> Status:
    """Return the status of a run whose files are damaged; `why` is the damage in words."""
    return replace(summarize(run, [], [], {}), state=RunState.UNREADABLE, why=why)


def summarize(
    run: RunFolder,
    events: Sequence[JournalEvent],
    jobs: Sequence[str],
    queue: Mapping[str, QueuedJob],
) -> Status:
    """Return the status of a run from its journal, the ids of all its jobs (oldest first), and the
    user's jobs in Slurm by id. Raise OSError where the journal of a task of it can't be read."""
    started, rerun = last_event(events, Started), last_event(events, Rerun)
    metrics, finished = last_event(events, MetricsLine), last_event(events, Finished)
    saved = last_event(events, CheckpointSaved)
    queued = [queue[job] for job in jobs if job in queue]
    state, why = find_state(run, events, queued)
    if state is RunState.WAITING:
        running = sum(_is_running(task, queue) for task in run.tasks())
        if running:
            state, why = RunState.RUNNING, f"{running} tasks run, others wait"
    now = time.time()
    waits, runs = state is RunState.WAITING, state is RunState.RUNNING
    seconds = goodput.account(events, now if state.is_live else None, waits=waits)
    slow = slow_rank(events) if runs else None
    return Status(
        run=str(run.path),
        name=run.name,
        id=run.id,
        state=state,
        job_id=jobs[-1] if jobs else None,
        attempt=started.attempt if started else None,
        nodes=len(started.nodes) if started and started.nodes else None,
        step=last_step(events),
        total_steps=metrics.total_steps if metrics else None,
        loss=metrics.number("loss") if metrics else None,
        samples_per_s=metrics.number("samples_per_s") if metrics else None,
        last_checkpoint_s=now - saved.time if saved else None,
        time_left_s=_time_left_s(queued) if runs else None,
        eta_s=_eta_s(events, metrics, now) if runs else None,
        goodput=goodput.share(seconds),
        seconds={part: round(spent_s, 3) for part, spent_s in seconds.items()},
        why=explain_pending(why, jobs[-1])[0] if waits else why,
        reason=why if waits else "",
        slow=str(slow or ""),
        results=dict(finished.results or {}) if finished else {},
        rerun_of=rerun.of if rerun else None,
    )


def _is_running(task: RunFolder, queue: Mapping[str, QueuedJob]) -> bool:
    """Return whether a task has a running job; raise OSError where its journal can't be read."""
    jobs = task.job_ids(read_briefly(task.journal_folder))
    return any(job in queue and queue[job].state == "RUNNING" for job in jobs)


def _time_left_s(queued: Sequence[QueuedJob]) -> float | None:
    """Return the seconds that squeue leaves to the running job; None for a job without a limit, or
    without one."""
    limit = next((job.time_left for job in queued if job.state == "RUNNING"), "")
    try:
        return float(parse_time(limit))
    except UsageError:
        return None


def _eta_s(events: Sequence[JournalEvent], metrics: MetricsLine | None, now: float) -> float | None:
    """Return the seconds to the last step at the mean pace of this start, saves included; None
    where the last step or the pace is unknown. `now` is in unix seconds."""
    first = last_event(events, FirstStep, WorkerStarted)
    if metrics is None or not metrics.total_steps or not isinstance(first, FirstStep):
        return None
    steps = metrics.step - first.step
    if steps <= 0:
        return None
    pace_s = (metrics.time - first.time) / steps
    left_s = (metrics.total_steps - metrics.step) * pace_s - (now - metrics.time)
    return max(0.0, left_s)


def has_ended(run: RunFolder) -> bool:
    """Return whether a run makes no more progress by itself; False where Slurm gives no answer.
    Raise OSError where its journal can't be read."""
    if run.finished() or run.cancelled.exists():
        return True
    started = last_event(run.events(), Started)
    is_local = started is not None and started.pid is not None
    try:
        jobs = {} if is_local else slurm.queue()
    except HpcDdpError:
        return False
    state = status_of(run, jobs).state
    return not (state.is_live or state in (RunState.RENDERED, RunState.UNKNOWN))


def cancel(run: RunFolder) -> None:
    """End a run for good. The mark comes first, so that a verdict made just now sees it.

    Raises
    ------
    UsageError
        the run is finished, or another user could have written the ids of its processes and jobs
    HpcDdpError
        Slurm gives no answer, or does not cancel its jobs
    OSError
        the run's folder can't be read or written
    """
    check_executable(run)
    if run.finished():
        raise UsageError(f"run {run.path} is finished", hint=f"hpc-ddp status {run.id}")
    jobs: list[str] = []
    for folder in (run, *run.tasks()):
        if folder.finished():
            continue
        events = folder.events()
        # A first start of a job that the mark does not name is a wish to go on, and removes it.
        write_json(folder.cancelled, {"jobs": folder.job_ids(events)})
        folder.journal("submit").write(Cancelled())
        started = last_event(events, Started)
        if started and started.pid and process.is_live(started.process):
            os.kill(started.pid, signal.SIGTERM)
        jobs += folder.job_ids(events)
    if run.is_task:
        jobs = _jobs_of_task(run, jobs)
    if jobs and (live := _live_jobs(run, jobs)):
        slurm.cancel(live)


def _live_jobs(run: RunFolder, jobs: Sequence[str]) -> list[str]:
    """Return the jobs that are not over and that run this run's script.

    A journal may name a job of long ago, or of another cluster, whose number is that of another job
    of the user's now. A job that the run found itself in, by salloc, has another script. Raise
    HpcDdpError where Slurm gives no answer.
    """
    queue = slurm.queue()
    submitted = last_event(run.events(), Submitted)
    scripts = {os.path.realpath(folder.script) for folder in (run, RunFolder(run.whole))}
    is_allocation = submitted is not None and submitted.backend == "salloc"
    live = []
    for job_id in jobs:
        job = queue.get(job_id) or queue.get(job_id.partition("_")[0])
        if job and job.state not in OVER and (is_allocation or job.script in scripts):
            live.append(job_id)
    return live


def _jobs_of_task(task: RunFolder, jobs: Sequence[str]) -> list[str]:
    """Return job ids that mean this task only, of the task's own `jobs` and the array's: the last
    task of an array has the array's id."""
    array = RunFolder(task.whole)
    array_jobs = array.job_ids(array.events())
    task_ids = [f"{job}_{task.index}" for job in array_jobs]
    return [*task_ids, *(job for job in jobs if job not in array_jobs)]
