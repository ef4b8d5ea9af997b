"""The status of a run, one line of ``hpc-ddp status``, from its journal and Slurm's queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.slurm_values import slurm_seconds
from hpc_ddp.core.journal import goodput
from hpc_ddp.core.journal.enums import Action
from hpc_ddp.core.journal.events import (
    CheckpointSaved,
    Finished,
    FirstStep,
    JournalEvent,
    MetricsLine,
    Rerun,
    Started,
    Submitted,
    VerdictGiven,
    WorkerStarted,
)
from hpc_ddp.core.journal.journal import is_finished, last_event, last_step, read_briefly
from hpc_ddp.core.journal.stragglers import slow_rank
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Life, Queue, describe_job, describe_work, has_ended_for_good
from hpc_ddp.report.explain.patterns import explain_pending
from hpc_ddp.report.status.run_state import RunState, find_state
from hpc_ddp.slurm_text import QueuedJob


@dataclass(frozen=True)
class Status:
    """The status of one run.

    Attributes
    ----------
    run, name, id
        the path of its folder, its name, and its id
    state, why
        its state, and the reason as text, '' without one
    job_id
        the newest job's id, None without a job
    attempt, nodes
        the number of the newest start, from 0, and how many nodes it has
    step, total_steps, loss, samples_per_s
        the newest numbers in the journal; None for an unknown one, as in all fields
    last_checkpoint_s
        the age of the newest checkpoint, in seconds
    time_left_s, eta_s
        of a running run: seconds to its attempt's time limit, and to its last step at the pace of
        this attempt
    goodput, seconds
        a number from 0 to 1, and the seconds of each part of the wall time (see
        `hpc_ddp.core.journal.goodput`)
    reason
        Slurm's own word for the reason why the run waits, '' for a run that does not wait
    slow
        a phrase on the rank that the others wait for, '' without one (see
        `hpc_ddp.core.journal.stragglers`)
    results
        the results that the script passed to ``run.finish``, by name; None for one that is no
        number
    rerun_of
        the folder of the run that it repeats; None for a run that is no rerun
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
        """The step as text, ``400/1000`` or ``400``; None without one."""
        if self.step is None:
            return None
        return f"{self.step}/{self.total_steps}" if self.total_steps else str(self.step)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name, for JSON."""
        return asdict(self)


def status_of(run: RunFolder, queue: Queue) -> Status:
    """Return the status of one run by its journal and `queue`, the user's jobs in Slurm; raise
    OSError where its journal, or that of a task, can't be read."""
    events = read_briefly(run.journal_folder)
    return summarize(run, events, run.jobs(events), queue)


def unreadable_status(run: RunFolder, why: str) -> Status:
    """Return the status of a run of which a file, or a file of a task, is damaged; `why` is the
    damage as text."""
    missing = RunFolder(run.path / "nothing")  # has neither tasks nor a journal
    status = summarize(missing, [], [], Queue(None))
    status = replace(status, run=str(run.path), name=run.name, id=run.id)
    return replace(status, state=RunState.UNREADABLE, why=why)


def summarize(
    run: RunFolder, events: Sequence[JournalEvent], jobs: Sequence[JobRef], queue: Queue
) -> Status:
    """Return the status of a run from its journal (`events`), all its jobs (oldest first), and
    `queue`, the user's jobs in Slurm.

    The state is that of `find_state`, with two exceptions: a run that is lost, or to be requeued,
    is unknown where its newest job can't be asked for; and an array that waits is running where a
    task of it runs. Raise OSError where a task's journal, or a job's script, can't be read.
    """
    started, rerun = last_event(events, Started), last_event(events, Rerun)
    metrics, finished = last_event(events, MetricsLine), last_event(events, Finished)
    saved = last_event(events, CheckpointSaved)
    queued = [line for job in jobs if (line := queue.find(job, run))]
    state, why = _state_by_queue(run, events, jobs, queue, queued)
    now = time.time()
    waits, runs = state is RunState.WAITING, state is RunState.RUNNING
    seconds = goodput.account(events, now if state.is_live else None, waits=waits)
    slow = slow_rank(events) if runs else None
    reason, why = (why, explain_pending(why, jobs[-1].id)[0]) if waits else ("", why)
    return Status(
        run=str(run.path),
        name=run.name,
        id=run.id,
        state=state,
        job_id=jobs[-1].id if jobs else None,
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
        why="; ".join(filter(None, (run.vain_text, why))),
        reason=reason,
        slow=str(slow or ""),
        results=dict(finished.results or {}) if finished else {},
        rerun_of=rerun.of if rerun else None,
    )


def _state_by_queue(
    run: RunFolder,
    events: Sequence[JournalEvent],
    jobs: Sequence[JobRef],
    queue: Queue,
    queued: Sequence[QueuedJob],
) -> tuple[RunState, str]:
    """Return state and reason as `find_state` does, with the two exceptions that `summarize` names.
    `queued` are the run's jobs that Slurm still has. Raise OSError where `summarize` does."""
    state, why = find_state(run, events, queued)
    started = last_event(events, Started)
    is_of_job = bool(jobs) and (started is None or started.pid is None)
    can_be_live = state is RunState.LOST or (state is RunState.STOPPED and _is_requeued(events))
    if can_be_live and is_of_job and queue.life(jobs[-1], run) is Life.UNKNOWN:
        return RunState.UNKNOWN, describe_job(jobs[-1], queue, run)
    if state is RunState.WAITING:
        running = sum(_is_running(task, queue) for task in run.tasks())
        if running:
            return RunState.RUNNING, f"{running} tasks run, others wait"
    return state, why


def _is_requeued(events: Sequence[JournalEvent]) -> bool:
    """Return whether the last verdict was to put the job back into Slurm's queue; False without a
    verdict, and for a run in an allocation or on this machine, which has no such job."""
    submitted, verdict = last_event(events, Submitted), last_event(events, VerdictGiven)
    is_batch = submitted is None or submitted.backend not in ("salloc", "local")
    return is_batch and verdict is not None and verdict.action == Action.REQUEUE


def _is_running(task: RunFolder, queue: Queue) -> bool:
    """Return whether a task of an array has a running job; raise OSError where its journal can't be
    read."""
    jobs = task.jobs(read_briefly(task.journal_folder))
    lines = [queue.find(job, task) for job in jobs]
    return any(line is not None and line.state == "RUNNING" for line in lines)


def _time_left_s(queued: Sequence[QueuedJob]) -> float | None:
    """Return the seconds that squeue leaves to the running job; None for a job without a time
    limit, and where no job runs."""
    left_s = slurm_seconds(next((job.time_left for job in queued if job.state == "RUNNING"), ""))
    return None if left_s is None else float(left_s)


def _eta_s(events: Sequence[JournalEvent], metrics: MetricsLine | None, now: float) -> float | None:
    """Return the estimated seconds from `now`, in unix seconds, to the run's last step, at the mean
    pace of the newest start, saves included; 0 where the estimate is over. None where the number
    of all steps is unknown, or the newest start has no two steps in the journal. `metrics` is the
    newest event of its kind."""
    # It is a FirstStep only if the newest start has made a step.
    newest = last_event(events, FirstStep, WorkerStarted, Started)
    if metrics is None or not metrics.total_steps or not isinstance(newest, FirstStep):
        return None
    steps = metrics.step - newest.step
    if steps <= 0 or metrics.time <= newest.time:  # `metrics` are those of an earlier start
        return None
    pace_s = (metrics.time - newest.time) / steps
    left_s = (metrics.total_steps - metrics.step) * pace_s - (now - metrics.time)
    return max(0.0, left_s)


def has_ended(run: RunFolder) -> bool:
    """Return whether a run makes no more progress by itself, by its journal, and for a run with a
    job by Slurm's queue, which is queried.

    True for a cancelled run, even if its job is still ending. A finished run has ended once its job
    or process has ended: rank 0 reports that the run is finished before the script's last lines.
    Without an answer of Slurm, the result is True for a finished run and False for others. A run
    that was only rendered, or whose state is unknown, has not ended. Raise OSError where the
    journal of the run, or of a task of it, can't be read, and what `Queue.find` raises.
    """
    if run.cancelled.exists():
        return True
    events = run.events()
    started, is_done = last_event(events, Started), is_finished(events)
    if is_done and has_ended_for_good(events):
        return True
    is_local = started is not None and started.pid is not None
    try:
        queue = Queue(None if is_local else slurm.list_jobs())
    except HpcDdpError:
        return is_done
    if is_done:
        return describe_work(run, queue, guesses=False) is None
    state = status_of(run, queue).state
    return not (state.is_live or state in (RunState.RENDERED, RunState.UNKNOWN))
