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
from hpc_ddp.node.outcome.attempt_facts import AttemptFacts
from hpc_ddp.node.outcome.chain import own_id, queue_next_link
from hpc_ddp.node.outcome.excluded_nodes import keep_off
from hpc_ddp.node.outcome.first_job import RESTARTS
from hpc_ddp.node.outcome.verdict import Verdict
from hpc_ddp.slurm_text import CANCELLED, HAS_NO_NODES, OVER, Job

PAUSE_S = 5.0
SECOND_ANSWER_S = 5.0  # how long a second answer of Slurm is waited for
REQUEUE_TRIES = 120  # to requeue a job, each after a look at Slurm's record of the job
REFUSED_PAUSES_S = 10.0, 30.0
MAY_BE_REQUEUED = "Requeue=1"  # of a job of a chain, or of a site that does not requeue by default
VERDICT_S = 20.0  # of the job's time, kept free for the end of its verdict
UNSETTLED = ("SUSPENDED", "CONFIGURING")  # of a job whose batch script runs: it says nothing yet


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


def count_restarts(environ: dict[str, str]) -> int:
    """Return how often Slurm has started this job again; 0 where SLURM_RESTART_COUNT is not set or
    0, also outside of a job.

    Slurm sets SLURM_RESTART_COUNT only in a job that it has started again. But a person may have
    called sbatch in such a job, and the new job has inherited the variable: so Slurm is asked.
    Without an answer, which is printed, the variable counts, with the value that Slurm gave it:
    where `first_job.variables` has changed it, `RESTARTS` has that value. Raises KeyError where the
    count is not 0 and SLURM_JOB_ID is not set.
    """
    restarts = noted_restarts(environ)
    job = ask_about_job(environ["SLURM_JOB_ID"]) if restarts else None
    return job.restarts if job else restarts


def noted_restarts(environ: dict[str, str]) -> int:
    """Return how often this job was started again by the variables of its environment, 0 without
    them; a job that was submitted in one that had restarts has inherited SLURM_RESTART_COUNT."""
    return int(environ.get(RESTARTS) or environ.get("SLURM_RESTART_COUNT") or 0)


def await_settled_job(job_id: str) -> Job | None:
    """Wait until a job is neither suspended nor being set up, however long these states last, and
    return Slurm's record of the job; None, with the reason printed, once Slurm refuses or does not
    answer for two minutes.

    In these states the record does not tell how the job's step has ended. A suspension also reaches
    some nodes later than others: one node may have lost its workers before another node stops."""
    job = ask_about_job(job_id)
    while job and job.state in UNSETTLED:
        time.sleep(PAUSE_S)
        job = ask_about_job(job_id)
    return job


def carry_out_verdict(
    run: RunFolder,
    attempt: AttemptFolder,
    environ: dict[str, str],
    facts: AttemptFacts,
    verdict: Verdict,
) -> int:
    """Carry out a verdict: requeue the job, end its part of a chain, or print how the user goes on;
    keep the run's next job off bad nodes. Return the batch script's exit code: 0 if the run
    continues, `CAN_GO_ON` if only the user can continue it, else the verdict's own code.

    A silent Slurm is waited for until `_last_moment`; its refusals are printed. Raises OSError if
    the run's folder can't be read or written, KeyError outside of a job.
    """
    is_interactive = INTERACTIVE in environ  # an allocation is no batch job: nothing to requeue
    if facts.spec.continue_by == "resubmit" and not is_interactive:
        return _end_link(run, attempt, environ, facts, verdict)
    if verdict.action == Action.REQUEUE:
        if is_interactive:
            say(f"go on with: hpc-ddp submit --backend salloc --run {run.quoted}")
            return CAN_GO_ON
        return _go_on(run, attempt, environ, facts, verdict.pause_s)
    if verdict.cause == Cause.SUPERSEDED and facts.bad_nodes and run.is_newest(facts.attempt):
        # Slurm itself has requeued the job, since it has lost a node.
        keep_off(run, own_id(environ), _last_moment(attempt, environ))
    return verdict.exit_code


def _go_on(
    run: RunFolder,
    attempt: AttemptFolder,
    environ: dict[str, str],
    facts: AttemptFacts,
    pause_s: float,
    is_chain: bool = False,
) -> int:
    """Requeue the job, if this attempt still is its current one; return the batch script's exit
    code. After a requeue the job is kept off bad nodes, has its full time limit again, is put off
    by `pause_s` seconds, and Slurm ends the batch shell. Where Slurm refuses the requeue, a new job
    is queued, and put off as long; in a chain (`is_chain`) that comes first, and the requeue where
    it is refused. Where Slurm refuses both, they are tried again after each of `REFUSED_PAUSES_S`.

    The code is 0 if the run goes on, also where this attempt is not the current one. It is
    `CAN_GO_ON` where the user has cancelled the run, where the job is over by now, where
    no new job can be queued, or where neither a requeue nor a refusal has come until
    `_last_moment` or in `REQUEUE_TRIES` tries; the reason is printed. Raises OSError if the run's
    folder can't be read or written.
    """
    job_id = own_id(environ)
    give_up = _last_moment(attempt, environ)
    # Slurm is asked again: the disk may have been slow with the verdict, and a requeue would undo a
    # `scancel` since then. Where Slurm is slow, its answer from before the verdict counts.
    soon = min(give_up, time.monotonic() + SECOND_ANSWER_S)
    job = ask_about_job(job_id, is_quiet=True, give_up=soon) or facts.job
    refusals, pauses = 0, [*REFUSED_PAUSES_S]
    wants_new_job = is_chain
    may_be_done = False  # a requeue got no answer, and may have been made
    for _ in range(REQUEUE_TRIES):
        job = job or ask_about_job(job_id, give_up=give_up)  # None: the answer is too old
        if job is None and time.monotonic() > give_up - PAUSE_S:
            break
        if job is None:
            time.sleep(PAUSE_S)
            continue
        if job.restarts != facts.restarts or not run.is_newest(facts.attempt):
            if may_be_done and job.restarts == facts.restarts + 1:  # by the try without an answer
                prepare_next_start(run, facts.spec, job_id, job, give_up, pause_s)
                return 0
            say(f"attempt {facts.attempt} is no longer the job's current one: left alone")
            return 0
        if run.cancelled.exists() or is_over(job):
            say(f"the job is {job.state} by now: not requeued")
            return CAN_GO_ON
        if job.state in UNSETTLED:
            job = None
            time.sleep(PAUSE_S)
            continue
        if wants_new_job:
            if _queue_new_job(run, attempt, environ, pause_s):
                return 0
        else:
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
                prepare_next_start(run, facts.spec, job_id, job, give_up, pause_s)
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


def prepare_next_start(
    run: RunFolder, spec: JobSpec, job_id: str, job: Job, give_up: float | None, pause_s: float
) -> None:
    """Keep a requeued job off bad nodes (`keep_off`, which waits for Slurm until `give_up`), and,
    unless it was preempted, give it its full time limit, and put it off by `pause_s` seconds. `job`
    is Slurm's last record of the job. Raises OSError if the journal can't be read."""
    keep_off(run, job_id, give_up)
    if not job.preempted:  # a preempted job can't be changed before its next start
        _restore_limit(spec, job_id, job.limit_s)
        _put_off(job_id, pause_s)


def _put_off(job_id: str, pause_s: float) -> None:
    """Have Slurm start a waiting job in `pause_s` seconds at the earliest, and print so; do nothing
    for 0. A refusal of Slurm is printed, and leaves the job as it is."""
    if not pause_s:
        return
    try:
        slurm.update_job(job_id, f"StartTime=now+{pause_s:.0f}")
    except HpcDdpError as error:
        say(error.message)
    else:
        # Slurm fails a job that starts within cred_expire (120 s) of its requeue.
        sooner = f"scontrol update JobId={job_id} StartTime=now+150"
        say(f"what its start lacks may come back: it waits {pause_s / 60:.0f} minutes, or {sooner}")


def _restore_limit(spec: JobSpec, job_id: str, limit_s: float | None) -> None:
    """Set the time limit of a waiting job with ``--time-min`` to its ``--time`` again; do nothing
    for a job without ``--time-min``, or where `limit_s` is no shorter than ``--time``.

    `limit_s` is the limit in seconds that Slurm chose for this attempt (None: not known). The
    requeued job would keep it, and a user may raise a limit only while the job waits. A refusal of
    Slurm is printed."""
    if not spec.time_min or (limit_s or 0) >= (spec.time_s or math.inf):
        return
    try:
        slurm.update_job(job_id, f"TimeLimit={spec.time}")
    except HpcDdpError as error:
        say(
            f"the next attempt has the time limit of this one, and not {spec.time}: {error.message}"
        )


def _last_moment(attempt: AttemptFolder, environ: dict[str, str]) -> float:
    """Return the time of ``time.monotonic()`` until which the verdict waits for Slurm: `VERDICT_S`
    before the end of the job's time, inf without a time limit. A silent Slurm has refused nothing,
    so the wait is as long as possible."""
    end = read_seconds(attempt.end_time) or AttemptEnv.from_env(environ).end_time
    return math.inf if end is None else time.monotonic() + end - time.time() - VERDICT_S


def _queue_new_job(
    run: RunFolder, attempt: AttemptFolder, environ: dict[str, str], pause_s: float
) -> bool:
    """Queue a new job that continues the run, put off by `pause_s` seconds: the site has refused
    the requeue of this job, or a chain has no next job. Return whether Slurm has taken it, and
    print so, or why not. Raises OSError as `queue_next_link`."""
    link = queue_next_link(run, attempt, environ, _last_moment(attempt, environ))
    if link:
        say(f"it goes on as job {link.id}")
        _put_off(link.id, pause_s)
    return link is not None


def prepare_failed_end(environ: dict[str, str], code: int) -> int:
    """Return the exit code with which the batch script ends the job as failed: `code`, or another
    code where the cluster's RequeueExit or RequeueExitHold lists `code`; the change is printed.
    After a listed code Slurm would start the job again, for ever, even one with ``--no-requeue``.

    Slurm requeues and holds an expedited job that fails: this forbids Slurm the requeue of such a
    job, and prints a refusal. In an allocation `code` is returned as it is, and Slurm is not asked.
    Raises KeyError outside of a job.
    """
    if INTERACTIVE in environ:
        return code
    job_id = own_id(environ)
    job = ask_about_job(job_id)
    if job and job.expedited:
        try:
            slurm.forbid_requeue(job_id)
        except HpcDdpError as error:
            say(f"{error.message}; Slurm may hold the job now: hpc-ddp cancel ends it")
    restarting = slurm.restarting_codes()
    if code not in restarting:
        return code
    end_code = min({*range(1, 126)} - restarting, default=code)  # from 126 on a shell's own codes
    say(f"exit code {end_code} in place of {code}, with which this cluster starts jobs again")
    return end_code


def _leave_to_the_user(run: RunFolder) -> int:
    """Print the command by which the user continues a run; return the exit code `CAN_GO_ON`."""
    say(f"could not be requeued; go on with: hpc-ddp submit --run {run.quoted}")
    return CAN_GO_ON


def _end_link(
    run: RunFolder,
    attempt: AttemptFolder,
    environ: dict[str, str],
    facts: AttemptFacts,
    verdict: Verdict,
) -> int:
    """End one job of a chain; return the batch script's exit code.

    If the verdict is a requeue, the next job, which waits already, is kept off bad nodes and put
    off by the verdict's pause. A next job that is missing, or over already, is queued anew
    (`_go_on`), unless a person has cancelled it. The code is then 0, or `CAN_GO_ON` where the run
    does not go on. After any other verdict the next job is cancelled, unless the attempt is
    superseded, and the code is the verdict's own. Refusals of Slurm are printed. Raises OSError if
    the run's folder can't be read or written.
    """
    link = attempt.link
    if verdict.action == Action.REQUEUE:
        give_up = _last_moment(attempt, environ)
        if link and (state := _end_state_of(link, give_up)):
            say(f"job {link.id}, which was to go on, has ended: {state}")
            if state == "CANCELLED":
                return _leave_to_the_user(run)
            link = None
        if link and facts.bad_nodes:
            keep_off(run, link.id, give_up)
        if link:
            _put_off(link.id, verdict.pause_s)
            return 0
        return _go_on(run, attempt, environ, facts, verdict.pause_s, is_chain=True)
    if link and verdict.cause != Cause.SUPERSEDED:
        try:
            slurm.cancel([link.id])
        except HpcDdpError as error:  # the next job will read this verdict, and not start
            say(error.message)
    return verdict.exit_code


def _end_state_of(link: JobRef, give_up: float) -> str:
    """Return the state in which a chain's next job (`link`) has ended before its turn: Slurm's,
    where COMPLETING counts as ended, and PREEMPTED does not. '' where the job has not ended, or
    where Slurm gives no answer until `give_up`, a time of ``time.monotonic()``.

    The state is CANCELLED for each job that is cancelled (`Job.is_cancelled`: also DEADLINE,
    REVOKED, and by the controller COMPLETING without a reason), and for one that the controller
    does not know, and the accounting does not know either, or can't be asked.
    """
    try:
        job = slurm.show_job(link.id, give_up)
    except slurm.NoAnswerError:
        return ""
    except HpcDdpError:
        with suppress(HpcDdpError):
            state = slurm.find_record(link).state.partition(" ")[0]  # CANCELLED by 1000
            return _ended(state)
        return "CANCELLED"
    if job.is_cancelled:
        return "CANCELLED"
    return _ended(job.state)


def _ended(state: str) -> str:
    """Return a state in which a job has ended, '' for another one; CANCELLED for each of these that
    means so."""
    if state in CANCELLED:
        return "CANCELLED"
    return state if state in (*OVER, "COMPLETING") else ""
