"""A verdict is carried out: the run goes on, or the job and what waits for it are ended."""

from __future__ import annotations

import time

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import INTERACTIVE
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.attempt_facts import AttemptFacts
from hpc_ddp.node.outcome.requeue.chain import leave_to_the_user, own_id
from hpc_ddp.node.outcome.requeue.excluded_nodes import exclusion_of, note_vain_node
from hpc_ddp.node.outcome.requeue.job_change import change_job
from hpc_ddp.node.outcome.requeue.kept_variables import RESTARTS
from hpc_ddp.node.outcome.requeue.next_start import (
    PAUSE_S,
    UNSETTLED,
    EndedStart,
    ask_about_job,
    go_on,
    last_moment,
)
from hpc_ddp.node.outcome.verdict import Verdict
from hpc_ddp.slurm_text import Job


def count_restarts(environ: dict[str, str]) -> int:
    """Return how often Slurm has started this job again; 0 where SLURM_RESTART_COUNT is not set or
    0, also outside of a job.

    Slurm sets SLURM_RESTART_COUNT only in a job that it has started again. But a person may have
    called sbatch in such a job, and the new job has inherited the variable: so Slurm is asked.
    Without an answer, which is printed, the variable counts, with the value that Slurm gave it:
    where `kept_variables.variables` has changed it, `RESTARTS` has that value. Raises KeyError
    where the count is not 0 and SLURM_JOB_ID is not set.
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
    """Carry out a verdict: have the run go on (`go_on`), or print how the user goes on; where the
    verdict ends it, cancel a chain's next job; keep a job that Slurm itself has requeued off bad
    nodes; note the node of a failure without progress (`note_vain_node`). Return the batch script's
    exit code: 0 if the run goes on, `CAN_GO_ON` if only the user can continue it, else the
    verdict's own code.

    A silent Slurm is waited for until `last_moment`; its refusals are printed. Raises OSError if
    the run's folder can't be read or written, KeyError outside of a job.
    """
    link = attempt.link
    ids = facts.restarts, facts.attempt
    start = EndedStart(run, facts.spec, environ, *ids, attempt, verdict.pause_s)
    if verdict.cause == Cause.FINISHED and run.lacks_teardown(facts.spec.teardown):
        if INTERACTIVE in environ or start.is_last:
            say("the teardown was cut off")
            return leave_to_the_user(environ)
        say("the teardown was cut off: the job starts again for it")
        return go_on(start, facts.job)
    if verdict.action == Action.REQUEUE:
        if INTERACTIVE in environ:  # an allocation is no batch job: nothing to requeue
            say(f"go on with: hpc-ddp submit --backend salloc --run {run.quoted}")
            return CAN_GO_ON
        has_worked = facts.worked_attempts - {facts.attempt}
        if verdict.cause == Cause.FAILED and facts.failure and has_worked and not facts.progress:
            note_vain_node(run, facts.failure.node)
        return go_on(start, facts.job)
    if verdict.cause != Cause.SUPERSEDED and link and INTERACTIVE not in environ:
        try:
            slurm.cancel([link.id])
        except HpcDdpError as error:  # the next job will read this verdict, and not start
            say(error.message)
    if verdict.cause == Cause.SUPERSEDED and facts.bad_nodes and run.is_newest(facts.attempt):
        # Slurm itself has requeued the job, since it has lost a node.
        job_id = own_id(environ)
        change_job(job_id, exclusion_of(run, job_id, last_moment(attempt, environ)))
    return verdict.exit_code


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
