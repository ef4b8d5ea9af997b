"""How a run goes on after a start of its job: a chain's next job, a requeue, or a new job.

A requeue goes by job id. The shell of a start that a node failure has cut off would hit its own
successor with it, or bring a cancelled job back to life: so Slurm is asked before each try whether
the job still is in this very start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.file_io import read_json, read_seconds
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue.chain import (
    early_end_of,
    own_id,
    queue_link_in_vain,
    queue_next_link,
)
from hpc_ddp.node.outcome.requeue.excluded_nodes import exclusion_of
from hpc_ddp.node.outcome.requeue.job_change import JobChange, change_job
from hpc_ddp.slurm_text import HAS_NO_NODES, Job

PAUSE_S = 5.0
SECOND_ANSWER_S = 5.0  # how long a second answer of Slurm is waited for
REQUEUE_TRIES = 120  # to requeue a job, each after a look at Slurm's record of the job
REFUSED_PAUSES_S = 10.0, 30.0
MAY_BE_REQUEUED = "Requeue=1"  # of a job of a chain, or of a site that does not requeue by default
ASKING_S = 60.0  # that Slurm may take for answers on the nodes that the next start may have
VERDICT_S = 20.0  # of the job's time, kept free for the end of its verdict
UNSETTLED = ("SUSPENDED", "CONFIGURING")  # of a job whose batch script runs: it says nothing yet


@dataclass(frozen=True)
class EndedStart:
    """A start of the job of this process, after which the job's run goes on.

    `attempt` is the attempt of this start, None where the start came to nothing before one began.
    `newest` is the number of the run's newest attempt, -1 without any, and `restarts` the job's
    restart count, both as this start knows them. The next start is put off by `pause_s` seconds.
    """

    run: RunFolder
    spec: JobSpec
    environ: Mapping[str, str]
    restarts: int
    newest: int
    attempt: AttemptFolder | None = None
    pause_s: float = 0.0

    @property
    def job_id(self) -> str:
        """The job's `own_id`."""
        return own_id(self.environ)

    @property
    def give_up(self) -> float:
        """The time of ``time.monotonic()`` until which a silent Slurm is waited for: `last_moment`,
        two minutes from now without an attempt."""
        if self.attempt is None:
            return time.monotonic() + slurm.PATIENCE_S
        return last_moment(self.attempt, self.environ)

    @property
    def link(self) -> JobRef | None:
        """The next job that this start has queued for its end already, as one of a chain does; None
        without one. Raise OSError where that can't be read."""
        if self.attempt:
            return self.attempt.link
        early = read_json(self.run.early_links).get(self.environ["SLURM_JOB_ID"])
        return JobRef.parse(str(early)) if early else None

    def queue_new_job(self, give_up: float) -> JobRef | None:
        """Queue a new job that continues the run, and return it; None where Slurm refuses it, or
        does not answer until `give_up`, which is printed, and, without an
        attempt, where the disk refuses its record. Raise OSError as `queue_next_link`."""
        if self.attempt:
            return queue_next_link(self.run, self.attempt, self.environ, give_up)
        try:
            return queue_link_in_vain(self.run, self.environ, give_up)
        except OSError as error:  # no room for its record: a requeue needs none
            say(str(error))
            return None


def last_moment(attempt: AttemptFolder, environ: Mapping[str, str]) -> float:
    """Return the time of ``time.monotonic()`` until which the verdict waits for Slurm: `VERDICT_S`
    before the end of the job's time, inf without a time limit. A silent Slurm has refused nothing,
    so the wait is as long as possible."""
    end = read_seconds(attempt.end_time) or AttemptEnv.from_env(environ).end_time
    return math.inf if end is None else time.monotonic() + end - time.time() - VERDICT_S


def ask_about_job(job_id: str, is_quiet: bool = False, give_up: float | None = None) -> Job | None:
    """Ask Slurm's controller about a job, and return its record; None where Slurm refuses or does
    not answer. The reason is then printed, unless `is_quiet` is True.

    The wait for a silent controller ends at `give_up`, a time of ``time.monotonic()`` (inf: it
    never ends; None: it ends after two minutes).
    """
    try:
        return slurm.show_job(job_id, give_up)
    except HpcDdpError as error:
        if not is_quiet:
            say(error.message)
        return None


def go_on(start: EndedStart, job: Job | None = None) -> int:
    """Have a run go on after a start, by the next job that waits already, or else by a requeue or a
    new job (`_start_again`). Return the batch script's exit code: 0 if the run goes on, else
    `CAN_GO_ON`, with the reason printed. `job` is Slurm's record of the job, None without one.

    A waiting job is kept off bad nodes, and put off by the pause. One that has ended is replaced,
    unless a person has cancelled it. Refusals of Slurm are printed. Raises OSError if the run's
    folder can't be read or written.
    """
    link, give_up = start.link, start.give_up
    state = early_end_of(link, give_up) if link else ""
    if link and state:
        say(f"job {link.id}, which was to go on, has ended: {state}")
        if state == "CANCELLED":
            return _leave_to_the_user(start.run)
    elif link:
        changes = exclusion_of(start.run, link.id, give_up)
        change_job(link.id, [*changes, *_pause(link.id, start.pause_s)])
        return 0
    return _start_again(start, job, give_up)


def _start_again(start: EndedStart, last_answer: Job | None, give_up: float) -> int:
    """Requeue the job, if it still is in this start; return the batch script's exit code. After a
    requeue the job is kept off bad nodes, has its full time limit again, is put off by the start's
    pause, and Slurm ends the batch shell. Where Slurm refuses the requeue, a new job is queued, and
    put off as long; in a chain that comes first, and the requeue where it is refused. Where Slurm
    refuses both, they are tried again after each of `REFUSED_PAUSES_S`.

    The code is 0 if the run goes on, also where the job is in another start by now. It is
    `CAN_GO_ON` where the user has cancelled the run, where the job is over by now, where no new job
    can be queued, or where neither a requeue nor a refusal has come until `give_up` or in
    `REQUEUE_TRIES` tries; the reason is printed. Raises OSError if the run's folder can't be read
    or written.
    """
    run, job_id = start.run, start.job_id
    # Slurm is asked again: the disk may have been slow with the verdict, and a requeue would undo a
    # `scancel` since then. Where Slurm is slow, its answer from before the verdict counts.
    soon = min(give_up, time.monotonic() + SECOND_ANSWER_S)
    job = ask_about_job(job_id, is_quiet=True, give_up=soon) or last_answer
    refusals, pauses = 0, [*REFUSED_PAUSES_S]
    wants_new_job = start.spec.continue_by == "resubmit"
    changes: list[JobChange] | None = None
    may_be_done = False  # a requeue got no answer, and may have been made
    for _ in range(REQUEUE_TRIES):
        job = job or ask_about_job(job_id, give_up=give_up)  # None: the answer is too old
        if job is None and time.monotonic() > give_up - PAUSE_S:
            break
        if job is None:
            time.sleep(PAUSE_S)
            continue
        if job.restarts != start.restarts or not run.is_newest(start.newest):
            if may_be_done and job.restarts == start.restarts + 1:  # by the try without an answer
                _change_next(start, job, give_up, changes)
                return 0
            say(f"job {job_id} was started again, or its run goes on elsewhere: left alone")
            return 0
        was_cancelled = run.cancelled.exists()
        if was_cancelled or is_over(job):
            reason = "the run was cancelled" if was_cancelled else f"the job is {job.state} by now"
            say(f"{reason}: not requeued")
            return CAN_GO_ON
        if job.state in UNSETTLED:
            job = None
            time.sleep(PAUSE_S)
            continue
        if wants_new_job:
            if link := start.queue_new_job(give_up):
                say(f"it goes on as job {link.id}")
                change_job(link.id, _pause(link.id, start.pause_s))
                return 0
        else:
            # KillWait after the requeue Slurm kills this process; at a preemption, or near the end
            # of the job's time, it does so without a requeue.
            began = time.monotonic()
            if changes is None and not job.preempted and began + ASKING_S < give_up:
                changes = _changes_of_next(start, job, give_up)
                if time.monotonic() > began + 1:  # the job may have been cancelled since
                    job = None
                    continue
            try:
                if refusals:  # of a new job, so that nothing else is left
                    slurm.update_job(job_id, MAY_BE_REQUEUED)
                slurm.requeue(job_id)
            except slurm.NoAnswerError as error:
                say(f"{error.message}; trying again")
                job, may_be_done = None, True
                time.sleep(PAUSE_S)
                continue
            except HpcDdpError as error:
                say(error.message)
            else:
                _change_next(start, job, give_up, changes)
                return 0  # at once: Slurm would wait KillWait for a shell that lives on
        # Slurm also refuses where the job was requeued, or cancelled, a moment ago: a new job
        # would then run beside the old one. So the next round asks before it queues one.
        job, wants_new_job, refusals = None, not wants_new_job, refusals + 1
        if refusals % 2 == 0:  # a plugin, or a limit of the account, may refuse both for a moment
            if not pauses or time.monotonic() + pauses[0] > give_up:
                break
            time.sleep(pauses.pop(0))
    return _leave_to_the_user(run)


def is_over(job: Job) -> bool:
    """Return whether a job must be left as it is: it was cancelled, it has ended, or it waits.
    False after a preemption or the end of its time, when Slurm still takes a requeue, and in
    COMPLETING, the state of a job whose batch script still runs."""
    is_taken_away = job.preempted or job.reason == "TimeLimit"
    has_ended = job.is_cancelled or (job.state in HAS_NO_NODES and job.state != "COMPLETING")
    return has_ended and not is_taken_away


def _change_next(
    start: EndedStart, job: Job, give_up: float, changes: list[JobChange] | None
) -> None:
    """Make the `changes` of the requeued job; with None, those of `_changes_of_next`, whose errors
    are raised."""
    change_job(start.job_id, _changes_of_next(start, job, give_up) if changes is None else changes)


def _changes_of_next(start: EndedStart, job: Job, give_up: float) -> list[JobChange]:
    """Return the changes of the requeued job: it is kept off bad nodes (`exclusion_of`, which waits
    for Slurm until `give_up`), and, unless it was preempted, has its full time limit, and is put
    off by the start's pause. `job` is Slurm's last record of the job. Raises OSError if the journal
    can't be read."""
    changes = exclusion_of(start.run, start.job_id, give_up)
    if job.preempted:  # such a job can't be changed otherwise before its next start
        return changes
    return [*changes, *_full_limit(start.spec, job.limit_s), *_pause(start.job_id, start.pause_s)]


def _pause(job_id: str, pause_s: float) -> list[JobChange]:
    """Return the change by which a waiting job starts in `pause_s` seconds at the earliest; [] for
    0."""
    if not pause_s:
        return []
    # Slurm fails a job that starts within cred_expire (120 s) of its requeue.
    sooner = f"scontrol update JobId={job_id} StartTime=now+150"
    done = f"what its start lacks may come back: it waits {pause_s / 60:.0f} minutes, or {sooner}"
    return [JobChange(f"StartTime=now+{pause_s:.0f}", done)]


def _full_limit(spec: JobSpec, limit_s: float | None) -> list[JobChange]:
    """Return the change by which a waiting job with ``--time-min`` has its ``--time`` again; [] for
    a job without ``--time-min``, or where `limit_s` is no shorter than ``--time``.

    `limit_s` is the limit in seconds that Slurm chose for this attempt (None: not known). The
    requeued job would keep it, and a user may raise a limit only while the job waits."""
    if not spec.time_min or (limit_s or 0) >= (spec.time_s or math.inf):
        return []
    text = f"the next attempt has the time limit of this one, and not {spec.time}: "
    return [JobChange(f"TimeLimit={spec.time}", refused=text)]


def _leave_to_the_user(run: RunFolder) -> int:
    """Print the command by which the user continues a run; return the exit code `CAN_GO_ON`."""
    say(f"could not be requeued; go on with: hpc-ddp submit --run {run.quoted}")
    return CAN_GO_ON
