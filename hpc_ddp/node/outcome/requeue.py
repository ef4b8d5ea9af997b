"""How a run goes on after an attempt: a requeue, or the next job of a chain; off bad nodes.

A requeue goes by job id. The shell of an attempt that a node failure has cut off would hit its
own successor with it, or bring a cancelled job back to life: so Slurm is asked before each try
whether the job still is in this very attempt.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import INTERACTIVE, AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.file_io import read_seconds
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.chain import own_id, queue_next_link
from hpc_ddp.node.outcome.excluded_nodes import keep_off
from hpc_ddp.node.outcome.first_job import RESTARTS
from hpc_ddp.node.outcome.verdict import AttemptFacts, Verdict
from hpc_ddp.slurm_text import HAS_NO_NODES, OVER, Job

PAUSE_S = 5.0
SECOND_ANSWER_S = 5.0  # how long a second answer of Slurm is waited for
REQUEUE_TRIES = 120  # to requeue a job, each after a look at Slurm's record of the job
VERDICT_S = 20.0  # of the job's time, kept free for the end of its verdict
UNSETTLED = ("SUSPENDED", "CONFIGURING")  # of a job whose batch script runs: it says nothing yet


def ask(job_id: str, is_quiet: bool = False, give_up: float | None = None) -> Job | None:
    """Return Slurm's record of a job; None where Slurm refuses or does not answer. The reason is
    printed then, unless `is_quiet`.

    The wait for a silent controller ends at `give_up`, a time of ``time.monotonic()`` (inf: it
    never ends; None: it ends after two minutes).
    """
    try:
        return slurm.show_job(job_id, give_up)
    except HpcDdpError as error:
        if not is_quiet:
            say(error.message)
        return None


def restarts_of(environ: dict[str, str]) -> int:
    """Return how often Slurm has started this job again; 0 where SLURM_RESTART_COUNT is not set,
    also outside of a job.

    Slurm sets SLURM_RESTART_COUNT only in a job that it has started again. But a person may have
    called sbatch in such a job, and the new job has inherited the variable: so Slurm is asked.
    Without an answer the variable counts, with the value that Slurm gave it (`first_job.variables`
    may have changed it). Raises KeyError where it is set and SLURM_JOB_ID is not.
    """
    restarts = int(environ.get(RESTARTS) or environ.get("SLURM_RESTART_COUNT") or 0)
    job = ask(environ["SLURM_JOB_ID"]) if restarts else None
    return job.restarts if job else restarts


def ask_settled(job_id: str) -> Job | None:
    """Wait until a job is neither suspended nor being set up, however long these states last;
    return Slurm's record of the job, or None, as `ask` does. In these states the record does not
    tell how the job's step has ended. A suspension also reaches some nodes later than others: one
    node may have lost its workers before another one stops."""
    job = ask(job_id)
    while job and job.state in UNSETTLED:
        time.sleep(PAUSE_S)
        job = ask(job_id)
    return job


def go_on(
    run: RunFolder,
    attempt: AttemptFolder,
    environ: dict[str, str],
    facts: AttemptFacts,
    decided: Verdict,
) -> int:
    """Carry out the verdict `decided`: requeue the job, end its part of a chain, or print how the
    user goes on; keep the run off bad nodes. Return the batch script's exit code: 0 if the run
    continues, `CAN_GO_ON` if only the user can continue it, else the verdict's own.

    A silent Slurm is waited for until `_last_moment`; its refusals are printed. Raises OSError if
    the run's folder can't be read or written.
    """
    is_interactive = INTERACTIVE in environ  # an allocation is no batch job: nothing to requeue
    if facts.spec.continue_by == "resubmit" and not is_interactive:
        return _end_link(run, attempt, environ, facts, decided)
    if decided.action == Action.REQUEUE:
        if is_interactive:
            say(f"go on with: hpc-ddp submit --backend salloc --run {run.quoted}")
            return CAN_GO_ON
        return _requeue(run, attempt, environ, facts)
    if decided.cause == Cause.SUPERSEDED and facts.bad_nodes and run.is_newest(facts.attempt):
        # Slurm itself has requeued it, for the node that it has lost.
        keep_off(run, own_id(environ), _last_moment(attempt, environ))
    return decided.exit_code


def _requeue(
    run: RunFolder, attempt: AttemptFolder, environ: dict[str, str], facts: AttemptFacts
) -> int:
    """Requeue the job, if this attempt still is its current one; return the batch script's exit
    code. After a requeue the job is kept off bad nodes, has its full time limit again, and Slurm
    ends the batch shell. Where the site refuses the requeue, a new job is queued (`_resubmit`).

    The code is 0 if the run goes on, also where this attempt is not the current one; `CAN_GO_ON`
    where the job is cancelled or over by now, or where neither a requeue nor a refusal has come
    until `_last_moment` or in `REQUEUE_TRIES` tries; the reason is printed. Raises OSError if the
    run's folder can't be read or written.
    """
    job_id = own_id(environ)
    give_up = _last_moment(attempt, environ)
    # Again: the disk may have taken its time with the verdict, and a `scancel` since then would be
    # undone. Where Slurm is slow, the answer of before has to do.
    soon = min(give_up, time.monotonic() + SECOND_ANSWER_S)
    job = ask(job_id, is_quiet=True, give_up=soon) or facts.job
    is_refused = may_be_done = False
    for _ in range(REQUEUE_TRIES):
        job = job or ask(job_id, give_up=give_up)
        if job is None and time.monotonic() > give_up - PAUSE_S:
            break
        if job is None:
            time.sleep(PAUSE_S)
            continue
        if job.restarts != facts.restarts or not run.is_newest(facts.attempt):
            if may_be_done and job.restarts == facts.restarts + 1:  # by the try without an answer
                _prepare_next_start(run, facts, job_id, job, give_up)
                return 0
            say(f"attempt {facts.attempt} is no longer the job's current one: left alone")
            return 0
        ends = job.preempted or job.reason == "TimeLimit"
        is_over = job.is_cancelled or (job.state in HAS_NO_NODES and job.state != "COMPLETING")
        if run.cancelled.exists() or (is_over and not ends):
            say(f"the job is {job.state} by now: not requeued")
            return CAN_GO_ON
        if job.state in UNSETTLED:
            job = None
            time.sleep(PAUSE_S)
            continue
        if is_refused:
            return _resubmit(run, attempt, environ)
        try:
            slurm.requeue(job_id)
        except slurm.NoAnswerError as error:
            say(f"{error.message}; trying again")
            job, may_be_done = None, True
            time.sleep(PAUSE_S)
        except HpcDdpError as error:
            say(error.message)
            # It may also be that the job was requeued, or cancelled, a moment ago: a new one beside
            # it would be a twin.
            is_refused, job = True, None
        else:
            _prepare_next_start(run, facts, job_id, job, give_up)
            return 0  # at once: Slurm would wait KillWait for a shell that lives on
    return _leave_to_the_user(run)


def _prepare_next_start(
    run: RunFolder, facts: AttemptFacts, job_id: str, job: Job, give_up: float
) -> None:
    """Keep a requeued job off bad nodes (until `give_up`, by time.monotonic(), Slurm is asked), and
    give it its full time limit. `job` is Slurm's last answer on it."""
    keep_off(run, job_id, give_up)
    if not job.preempted:  # such a job can't be changed before its next start
        _restore_limit(facts.spec, job_id, job.limit_s)


def _restore_limit(spec: JobSpec, job_id: str, limit_s: float | None) -> None:
    """Set the time limit of a waiting job with ``--time-min`` to its ``--time`` again. For this
    attempt Slurm set the limit to `limit_s` seconds (None: not known): the requeued job would keep
    that, and the user may raise it only while the job waits. Does nothing without ``--time-min``,
    or where `limit_s` is no shorter than ``--time``. A refusal is printed."""
    if not spec.time_min or spec.time_s is None or (limit_s or 0) >= spec.time_s:
        return
    try:
        slurm.update_job(job_id, f"TimeLimit={spec.time}")
    except HpcDdpError as error:
        say(
            f"the next attempt has the time limit of this one, and not {spec.time}: {error.message}"
        )


def _last_moment(attempt: AttemptFolder, environ: dict[str, str]) -> float:
    """Return the time of ``time.monotonic()`` until which Slurm is waited for: `VERDICT_S` before
    the job's end, inf without a time limit. A silent Slurm has refused nothing, so it is waited
    for as long as possible."""
    end = read_seconds(attempt.end_time) or AttemptEnv.from_env(environ).end_time
    return math.inf if end is None else time.monotonic() + end - time.time() - VERDICT_S


def _resubmit(run: RunFolder, attempt: AttemptFolder, environ: dict[str, str]) -> int:
    """Queue a new job that continues the run, where the site refuses the requeue of this job, or a
    chain has no next job. Return the batch script's exit code: 0, or `CAN_GO_ON` where Slurm
    refuses the new job or does not answer. Raises OSError as `queue_next_link`."""
    link = queue_next_link(run, attempt, environ, _last_moment(attempt, environ))
    if link is None:
        return _leave_to_the_user(run)
    say(f"it goes on as job {link.id}")
    return 0


def end_as_failed(environ: dict[str, str], code: int) -> int:
    """Return the exit code with which the batch script ends the job as failed: `code`, or another
    code where the cluster's RequeueExit or RequeueExitHold lists `code`, which is printed. After a
    listed code Slurm would start the job again, for ever, even one with ``--no-requeue``.

    Slurm would requeue and hold an expedited job that fails, so this first forbids Slurm to requeue
    it; a refusal is printed. In an allocation `code` is returned as it is. Raises KeyError outside
    of a job.
    """
    if INTERACTIVE in environ:
        return code
    job_id = own_id(environ)
    job = ask(job_id)
    if job and job.expedited:
        try:
            slurm.forbid_requeue(job_id)
        except HpcDdpError as error:
            say(f"{error.message}; Slurm may hold the job now: hpc-ddp cancel ends it")
    restarting = slurm.restarting_codes()
    if code not in restarting:
        return code
    end_code = min({*range(1, 126)} - restarting, default=code)
    say(f"exit code {end_code} in place of {code}, with which this cluster starts jobs again")
    return end_code


def _leave_to_the_user(run: RunFolder) -> int:
    """Print the command that continues a run; return `CAN_GO_ON`."""
    say(f"could not be requeued; go on with: hpc-ddp submit --run {run.quoted}")
    return CAN_GO_ON


def _end_link(
    run: RunFolder,
    attempt: AttemptFolder,
    environ: dict[str, str],
    facts: AttemptFacts,
    decided: Verdict,
) -> int:
    """End one job of a chain; return the batch script's exit code.

    If the run continues, the next job, which waits already, is kept off bad nodes. A next job that
    is missing, or over already, is queued anew, unless a person has cancelled it. The code is then
    0, or `CAN_GO_ON` where there is no next job. If the run does not continue, the next job is
    cancelled, unless the attempt is superseded, and the code is the verdict's own. Refusals of
    Slurm are printed. Raises OSError if the run's folder can't be read or written.
    """
    link = attempt.link
    if decided.action == Action.REQUEUE:
        give_up = _last_moment(attempt, environ)
        if link and (state := _end_state_of(link, give_up)):
            say(f"job {link.id}, which was to go on, has ended: {state}")
            if state == "CANCELLED":
                return _leave_to_the_user(run)
            link = None
        if link and facts.bad_nodes:
            keep_off(run, link.id, give_up)
        return 0 if link else _resubmit(run, attempt, environ)
    if link and decided.cause != Cause.SUPERSEDED:
        try:
            slurm.cancel([link.id])
        except HpcDdpError as error:  # it will find the verdict, and not start
            say(error.message)
    return decided.exit_code


def _end_state_of(link: JobRef, give_up: float) -> str:
    """Return Slurm's state of a chain's next job that has ended before its turn; '' where it has
    not ended, or where Slurm gives no answer until `give_up`, a time of ``time.monotonic()``. A job
    that neither the controller nor the accounting knows counts as CANCELLED."""
    try:
        job = slurm.show_job(link.id, give_up)
    except slurm.NoAnswerError:
        return ""
    except HpcDdpError:
        with suppress(HpcDdpError):
            state = slurm.find_record(link).state
            return state if state.partition(" ")[0] in (*OVER, "COMPLETING") else ""
        return "CANCELLED"
    if job.is_cancelled:
        return "CANCELLED"
    return job.state if job.state in (*OVER, "COMPLETING") else ""
