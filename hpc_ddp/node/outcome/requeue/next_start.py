"""How a run goes on after a start of its job: a chain's next job, a requeue, or a new job.

A requeue goes by job id. The shell of a start that a node failure has cut off would hit its own
successor with it, or bring a cancelled job back to life: so Slurm is asked before each try whether
the job still is in this very start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.file_io import read_json, read_seconds, write_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue.chain import (
    early_end_of,
    leave_to_the_user,
    own_id,
    queue_next_early,
    queue_next_link,
)
from hpc_ddp.node.outcome.requeue.excluded_nodes import exclusion_of
from hpc_ddp.node.outcome.requeue.job_change import JobChange, change_job, full_limit, pause_of
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
    restart count, both as this start knows them. The next start is put off by `pause_s` seconds;
    `is_early` is True where that is the rest of a pause that Slurm has not kept.
    """

    run: RunFolder
    spec: JobSpec
    environ: Mapping[str, str]
    restarts: int
    newest: int
    attempt: AttemptFolder | None = None
    pause_s: float = 0.0
    is_early: bool = False

    @property
    def job_id(self) -> str:
        """The job's `own_id`."""
        return own_id(self.environ)

    @property
    def is_last(self) -> bool:
        """Whether ``max_requeues``, or the operators' limit, permits no further requeue."""
        limit = math.inf if self.spec.max_requeues is None else self.spec.max_requeues
        return self.restarts >= min(self.run.most_requeues, limit)

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
        does not answer until `give_up`, and, without an attempt, where the disk refuses its
        record; this is printed. Raise OSError as `queue_next_link`."""
        if self.attempt:
            return queue_next_link(self.run, self.attempt, self.environ, give_up)
        if self.environ["SLURM_JOB_ID"] in read_json(self.run.vain_jobs):
            return queue_next_early(self.run, self.environ, give_up)
        say("no new job, whose number nothing would bound: the disk refuses to note this start")
        return None

    def change_next(self, job_id: str, changes: Sequence[JobChange]) -> None:
        """Have Slurm make `changes` of the job that goes on (`change_job`). Its pause is noted
        until Slurm has taken it: a busy Slurm may start the job before, and such a start is put off
        once (`vain_start.keep_pause`). A disk that refuses the note is passed over."""
        pauses, own_name = self.run.pauses, job_id
        if job_id != self.job_id:  # a new job, in which a task has an id of its own
            ids = {"SLURM_JOB_ID": job_id, "SLURM_ARRAY_JOB_ID": job_id}
            own_name = own_id({**self.environ, **ids})
        with suppress(OSError):
            if self.pause_s and not self.is_early:
                write_json(pauses, {own_name: time.time() + self.pause_s})
        if change_job(job_id, changes) or self.is_early:
            with suppress(OSError):
                pauses.unlink(missing_ok=True)


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
    new job (`_Tries`). Return the batch script's exit code: 0 if the run goes on, else
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
            return leave_to_the_user(start.environ)
    elif link:
        changes = exclusion_of(start.run, link.id, give_up)
        start.change_next(link.id, [*changes, *pause_of(link.id, start.pause_s)])
        return 0
    return _Tries(start, give_up, job).make()


@dataclass
class _Tries:
    """The tries to requeue a start's job, if it still is in this start, or to queue a new job.

    Where Slurm refuses the requeue, a new job is queued; in a chain that comes first. Where Slurm
    refuses both, they are tried again after each of `pauses`, in seconds. `job` is Slurm's record
    of the job for the next try, None where Slurm has to be asked; `changes` are those of the
    requeued job, None while they are not known.
    """

    start: EndedStart
    give_up: float
    job: Job | None
    changes: list[JobChange] | None = None
    refusals: int = 0
    may_be_done: bool = False  # a requeue got no answer, and may have been made
    pauses: list[float] = field(default_factory=lambda: [*REFUSED_PAUSES_S])

    def make(self) -> int:
        """Make the tries; return the batch script's exit code. After a requeue Slurm ends the batch
        shell.

        The code is 0 if the run goes on, also where the job is in another start by now. It is
        `CAN_GO_ON` where the user has cancelled the run, where the job is over by now, where no new
        job can be queued, or where neither a requeue nor a refusal has come until `give_up` or in
        `REQUEUE_TRIES` tries; the reason is printed. Raises OSError if the run's folder can't be
        read or written.
        """
        # Slurm is asked again: the disk may have been slow with the verdict, and a requeue would
        # undo a `scancel` since then. Where Slurm is slow, its earlier answer counts.
        soon = min(self.give_up, time.monotonic() + SECOND_ANSWER_S)
        self.job = ask_about_job(self.start.job_id, is_quiet=True, give_up=soon) or self.job
        for _ in range(REQUEUE_TRIES):
            if (code := self._make_one()) is not None:
                return code
        return leave_to_the_user(self.start.environ)

    def _make_one(self) -> int | None:
        """Make one try; return the exit code, None for a further try. Raises as `make`."""
        job, self.job = self.job or ask_about_job(self.start.job_id, give_up=self.give_up), None
        if job is None and time.monotonic() > self.give_up - PAUSE_S:
            return leave_to_the_user(self.start.environ)
        if job and (code := self._code_without_try(job)) is not None:
            return code
        if job is None or job.state in UNSETTLED:
            time.sleep(PAUSE_S)
            return None
        is_chain = self.start.spec.continue_by == "resubmit"
        return self._queue() if is_chain == (self.refusals % 2 == 0) else self._requeue(job)

    def _code_without_try(self, job: Job) -> int | None:
        """Return the exit code where the job is in another start, or over; None for neither."""
        start, restarts = self.start, self.start.restarts
        if self.may_be_done and job.restarts == restarts + 1:  # by the requeue without an answer
            start.change_next(start.job_id, self._changes_of_next(job))
            return 0
        if job.restarts != restarts or not start.run.is_newest(start.newest):
            say(f"job {start.job_id} was started again, or its run goes on elsewhere: left alone")
            return 0
        if start.run.cancelled.exists():
            say("the run was cancelled: not requeued")
            return CAN_GO_ON
        if is_over(job):
            say(f"the job is {job.state} by now: not requeued")
            return CAN_GO_ON
        return None

    def _queue(self) -> int | None:
        """Queue a new job, put off by the pause, and return 0; without one as `_note_refusal`."""
        if not (link := self.start.queue_new_job(self.give_up)):
            return self._note_refusal()
        say(f"it goes on as job {link.id}")
        self.start.change_next(link.id, pause_of(link.id, self.start.pause_s))
        return 0

    def _requeue(self, job: Job) -> int | None:
        """Requeue the job and change it, and return 0; None without an answer, or where Slurm has
        to be asked about the job first; after a refusal as `_note_refusal`."""
        # KillWait after the requeue Slurm kills this process; at a preemption, or near the end of
        # the job's time, it does so without a requeue.
        began = time.monotonic()
        if self.changes is None and not job.preempted and began + ASKING_S < self.give_up:
            self._changes_of_next(job)
            if time.monotonic() > began + 1:  # the job may have been cancelled since
                return None
        try:
            if self.refusals:  # of a new job, so that nothing else is left
                slurm.update_job(self.start.job_id, MAY_BE_REQUEUED)
            slurm.requeue(self.start.job_id)
        except slurm.NoAnswerError as error:
            say(f"{error.message}; trying again")
            self.may_be_done = True
            time.sleep(PAUSE_S)
            return None
        except HpcDdpError as error:
            say(error.message)
            return self._note_refusal()
        self.start.change_next(self.start.job_id, self._changes_of_next(job))
        return 0  # at once: Slurm would wait KillWait for a shell that lives on

    def _note_refusal(self) -> int | None:
        """Note that Slurm has refused a requeue or a new job, and return None; where it has refused
        both, wait for the next pause, or without time for one return `CAN_GO_ON`.

        Slurm also refuses where the job was requeued, or cancelled, a moment ago: a new job would
        then run beside the old one. So the next try asks before it queues one."""
        self.refusals += 1
        if self.refusals % 2 == 0:  # a plugin, or a limit of the account, may refuse for a moment
            if not self.pauses or time.monotonic() + self.pauses[0] > self.give_up:
                return leave_to_the_user(self.start.environ)
            time.sleep(self.pauses.pop(0))
        return None

    def _changes_of_next(self, job: Job) -> list[JobChange]:
        """Return the changes of the requeued job, asked for once: it is kept off bad nodes
        (`exclusion_of`), and, unless it was preempted, has its full time limit, and is put off by
        the pause. `job` is Slurm's record of it. Raises OSError if the journal can't be read."""
        if self.changes is None:
            start = self.start
            self.changes = exclusion_of(start.run, start.job_id, self.give_up)
            if not job.preempted:  # such a job can't be changed otherwise before its next start
                self.changes += full_limit(start.spec, job.limit_s)
                self.changes += pause_of(start.job_id, start.pause_s)
        return self.changes


def is_over(job: Job) -> bool:
    """Return whether a job must be left as it is: it was cancelled, it has ended, or it waits.
    False after a preemption or the end of its time, when Slurm still takes a requeue, and in
    COMPLETING, the state of a job whose batch script still runs."""
    is_taken_away = job.preempted or job.reason == "TimeLimit"
    has_ended = job.is_cancelled or (job.state in HAS_NO_NODES and job.state != "COMPLETING")
    return has_ended and not is_taken_away
