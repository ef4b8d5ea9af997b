"""How a run goes on after an attempt: a requeue, or the next job of a chain; off bad nodes.

A requeue goes by job id. The shell of an attempt that a node failure has cut off would hit its
own successor with it, or bring a cancelled job back to life: so it is asked before each try
whether the job still is in this very attempt.
"""

from __future__ import annotations

import contextlib
import math
import re
import time

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import INTERACTIVE, AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.file_io import read_json, read_seconds, write_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.journal.events import VerdictGiven
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import link_job
from hpc_ddp.node.outcome.excluded_nodes import excluded_nodes, keep_off
from hpc_ddp.node.outcome.verdict import AttemptFacts, Verdict
from hpc_ddp.slurm_text import HAS_NO_NODES, Job

PAUSE_S = 5.0
TRIES = 120  # of a requeue, each with an answer of Slurm
VERDICT_S = 20.0  # of the job's time, kept free for the end of its verdict
UNSETTLED = ("SUSPENDED", "CONFIGURING")  # of a job whose batch script runs: it says nothing yet
CLUSTERS_OF_SUBMIT = ("SLURM_CLUSTERS", "SBATCH_CLUSTERS")
TAKEN_AWAY = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")


def ask(job_id: str, is_quiet: bool = False, give_up: float | None = None) -> Job | None:
    """Return Slurm's record of a job; None where it refuses or does not answer, and without
    `is_quiet` print why.

    `give_up`, a time of ``time.monotonic()``, ends the wait for a silent controller; inf: never,
    None: after two minutes.
    """
    try:
        return slurm.show_job(job_id, give_up)
    except HpcDdpError as error:
        if not is_quiet:
            say(error.message)
        return None


def ask_settled(job_id: str) -> Job | None:
    """Return Slurm's record of a job, or None, as `ask` does, once it is neither suspended nor
    being set up, however long that lasts: such a job says nothing of how its step has ended, and
    another node may stop later than one that has lost its workers."""
    job = ask(job_id)
    while job and job.state in UNSETTLED:
        time.sleep(PAUSE_S)
        job = ask(job_id)
    return job


def own_id(environ: dict[str, str]) -> str:
    """Return the id by which a command of Slurm changes this job and no other one.

    The number of an array's last task is that of the whole array, too: a requeue by it restarts all
    of its tasks, those that run and those that have finished. Raise KeyError outside of a job.
    """
    task = environ.get("SLURM_ARRAY_TASK_ID")
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else environ["SLURM_JOB_ID"]


# --- at the start of an attempt ------------------------------------------------------------


def is_link(run: RunFolder, job: JobRef) -> bool:
    """Tell whether a job was queued by the job before it, and not by a person."""
    return job.is_among(run.links())


def record_late_link(run: RunFolder, job: JobRef, environ: dict[str, str]) -> None:
    """Record a job as the link of the one that it waited for, which was killed before it could: its
    sbatch answered late. Nothing for a job that the run knows, as each that a person submits.

    Raise OSError if the run's folder can't be read or written.
    """
    dependency = re.fullmatch(r"afterany:(\d+)", environ.get("SLURM_JOB_DEPENDENCY", ""))
    jobs = run.jobs(run.events())
    if not dependency or job.is_among(jobs) or not JobRef(dependency[1]).is_among(jobs):
        return
    attempts = run.attempts()
    if attempts and attempts[-1].info.get("job_id") == dependency[1]:
        write_json(attempts[-1].path / "next.json", {"job_id": str(job)})
    else:
        write_json(run.early_links, {**read_json(run.early_links), dependency[1]: str(job)})


def check_wanted(
    run: RunFolder, restarts: int, is_link: bool, job: JobRef, array: JobRef | None = None
) -> None:
    """Refuse a job, a task of an `array` (None: of none), if its run was cancelled or given up,
    unless a person has queued it later.

    A first start (`restarts` is 0) of a job that is no link (`is_link`) is a wish to go on: it
    deletes the marks ``cancelled`` of the run and its array, unless they name the job or `array`.

    Raises
    ------
    HpcDdpError
        the run was cancelled or given up, and Slurm or a link has started this job; the job was
        cancelled as it started; or how the job before a link has ended can't be known
    OSError
        the run's folder can't be read or changed
    """
    if not restarts and not is_link:
        for folder in (run, RunFolder(run.whole)):
            names = read_json(folder.cancelled).get("jobs", ())
            marked = [JobRef.parse(str(name)) for name in names]
            if any(one and one.is_among(marked) for one in (job, array)):
                raise HpcDdpError(f"job {job.id} was cancelled as it started")
            if folder.cancelled.exists():  # a disk that is read-only refuses to remove nothing
                folder.cancelled.unlink(missing_ok=True)
    elif run.cancelled.exists() or (is_link and _chain_has_ended(run, job)):
        raise HpcDdpError(f"run {run.path} was cancelled, or given up")


def _chain_has_ended(run: RunFolder, link: JobRef) -> bool:
    """Tell whether the job before a link was the last one, and could not cancel it.

    A scancel may end that job before its verdict comes to it. One that ended in its set-up lines
    was taken away there, by a preemption or with its node, or has failed. Raise HpcDdpError where
    `_fate` does, OSError where the journal can't be read.
    """
    early = read_json(run.early_links)
    before = next((id for id, its in early.items() if link.is_same(JobRef.parse(str(its)))), None)
    if before:
        return _fate(run, before) not in TAKEN_AWAY
    attempts = run.attempts()
    if not attempts:
        return False
    last = last_event(run.events(), VerdictGiven)
    if last and last.attempt == attempts[-1].number:
        return last.cause == Cause.CANCELLED or last.action == Action.GIVE_UP
    last_id = str(attempts[-1].info.get("job_id") or "")
    return bool(last_id) and _fate(run, last_id) == "CANCELLED"


def _fate(run: RunFolder, job_id: str) -> str:
    """Return the state in which the job before a link has ended.

    The controller forgets a job after MinJobAge (300 s by default), and that it was taken away is
    then as likely as that it was cancelled: the accounting is asked. A silent controller is waited
    for without end. Raise HpcDdpError where neither knows it.
    """
    try:
        return slurm.show_job(job_id, give_up=math.inf).state
    except HpcDdpError:
        try:
            return slurm.record(job_id).state
        except HpcDdpError as error:
            raise HpcDdpError(
                f"how job {job_id}, which has queued this one, has ended is not known any more, so"
                f" that it may have been cancelled: {error.message}",
                hint=f"hpc-ddp submit --run {run.quoted} goes on",
            ) from None


def queue_early(run: RunFolder, environ: dict[str, str]) -> None:
    """Queue the chain's next job before this one's set-up lines, in which a preemption ends it, and
    note it in ``early-links.json``.

    A refusal of Slurm is printed, and nothing is noted. Raise OSError if the run's journal can't be
    read, or that file can't be written; in the latter case the job is queued.
    """
    link = _queue_link(run, environ)
    if link:
        early = {**read_json(run.early_links), environ["SLURM_JOB_ID"]: str(link)}
        write_json(run.early_links, early)


def take_back_early(run: RunFolder, environ: dict[str, str]) -> None:
    """Cancel the job that this one queued before its set-up lines: this one is not to start.

    Without one, nothing. A refused scancel is passed over: that job finds the reason itself. Raise
    OSError if ``early-links.json`` can't be written.
    """
    early = read_json(run.early_links)
    link = early.pop(environ["SLURM_JOB_ID"], None)
    if link:
        write_json(run.early_links, early)
        with contextlib.suppress(HpcDdpError):
            slurm.cancel([JobRef.parse(link).id])


def queue_next_link(
    run: RunFolder, attempt: AttemptFolder, environ: dict[str, str], give_up: float | None = None
) -> JobRef | None:
    """Queue the chain's next job, unless `queue_early` has, and return it.

    It is noted as the attempt's link, and ``early-links.json`` is deleted. None where Slurm refuses
    it, or does not answer until `give_up` (see `slurm.show_job`); the reason is printed. Each link
    does it at its start: at its end it may be killed. Raise OSError if the run's folder can't be
    read or written.
    """
    queued = read_json(run.early_links).get(environ["SLURM_JOB_ID"])
    link = JobRef.parse(queued) if queued else _queue_link(run, environ, give_up)
    if link:
        write_json(attempt.path / "next.json", {"job_id": str(link)})
    run.early_links.unlink(missing_ok=True)
    return link


def _queue_link(
    run: RunFolder, environ: dict[str, str], give_up: float | None = None
) -> JobRef | None:
    """Submit the script once more, to start after this job, on its cluster and off blamed nodes;
    link the job to the run and return it.

    None where Slurm refuses it, which is printed. `give_up` as `slurm.sbatch` has it. Raise OSError
    if a journal of the run can't be read.
    """
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    environ = {name: text for name, text in environ.items() if name not in CLUSTERS_OF_SUBMIT}
    options = [f"--dependency=afterany:{own_id(environ)}"]
    kept_off = excluded_nodes(run, own_id(environ), give_up)
    if kept_off:
        options.append(f"--exclude={','.join(kept_off)}")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    array = RunFolder(run.whole)  # an array's script is that of all its tasks
    if task:
        options.append(f"--array={task}")
    try:
        link = slurm.sbatch(
            array.script,
            environ,
            *options,
            earlier=[*array.jobs(array.events()), *run.jobs(run.events())],
            give_up=give_up,
            cluster=cluster,
        )
    except HpcDdpError as error:
        say(f"the next job of the chain could not be queued: {error.message}")
        return None
    link = JobRef(link.id, cluster)
    link_job(link, array)
    return link


# --- at its end ----------------------------------------------------------------------------


def go_on(
    run: RunFolder,
    attempt: AttemptFolder,
    environ: dict[str, str],
    facts: AttemptFacts,
    decided: Verdict,
) -> int:
    """Carry out a verdict; return the batch script's exit code: 0 if the run continues, `CAN_GO_ON`
    if only the user can continue it, else the verdict's own.

    Refusals of Slurm are printed. Raise OSError if the run's folder can't be read or written.
    """
    if facts.spec.continue_by == "resubmit":
        return _end_link(run, attempt, environ, facts, decided)
    if decided.action == Action.REQUEUE:
        if INTERACTIVE in environ:  # an allocation is no batch job: nothing to requeue
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
    """Requeue the job, if this attempt still is its current one, and keep it off bad nodes; return
    the batch script's exit code.

    After a requeue Slurm ends the batch shell, too. Where the site refuses it, `_resubmit`. 0 after
    a requeue, and for an attempt that is not the current one; `CAN_GO_ON` where the job is
    cancelled or over by now, or Slurm gives no answer until `_last_moment`, or in `TRIES` tries.
    Raise OSError if the run's folder can't be read or written.
    """
    job_id = own_id(environ)
    give_up = _last_moment(attempt, environ)
    job = facts.job  # of a moment ago: where Slurm is slow, another answer may come too late
    for _ in range(TRIES):
        job = job or ask(job_id, give_up=give_up)
        if job is None and time.monotonic() > give_up - PAUSE_S:
            break
        if job is None:
            time.sleep(PAUSE_S)
            continue
        if job.restarts != facts.restarts or not run.is_newest(facts.attempt):
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
        try:
            slurm.requeue(job_id)
        except slurm.NoAnswerError as error:
            say(f"{error.message}; trying again")
            job = None
            time.sleep(PAUSE_S)
        except HpcDdpError as error:
            say(error.message)
            return _resubmit(run, attempt, environ)
        else:
            keep_off(run, job_id, give_up)
            return 0  # at once: Slurm would wait KillWait for a shell that lives on
    return _left_to_the_user(run)


def _last_moment(attempt: AttemptFolder, environ: dict[str, str]) -> float:
    """Return until when Slurm is waited for, by ``time.monotonic()``; inf without a time limit.

    No answer is no refusal, so it is waited for until `VERDICT_S` before the job's end.
    """
    end = read_seconds(attempt.end_time) or AttemptEnv.from_env(environ).end_time
    return math.inf if end is None else time.monotonic() + end - time.time() - VERDICT_S


def _resubmit(run: RunFolder, attempt: AttemptFolder, environ: dict[str, str]) -> int:
    """Continue as a new job, where the site refuses the requeue of this one; return the exit code,
    0, or `CAN_GO_ON` without a new job. Raise OSError as `queue_next_link`."""
    link = queue_next_link(run, attempt, environ, _last_moment(attempt, environ))
    if link is None:
        return _left_to_the_user(run)
    say(f"it goes on as job {link.id}")
    return 0


def end_as_failed(environ: dict[str, str], code: int) -> int:
    """Have Slurm end the job as failed; return the exit code that does it, `code` where it can.

    Slurm would hold an expedited job in the queue instead. Where the cluster's RequeueExit or
    RequeueExitHold has the code, it would start the job again, for ever, also one that may not be
    requeued. A refusal, and another code, are printed.
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


def _left_to_the_user(run: RunFolder) -> int:
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
    """End one job of a chain: the next one waits already; cancel it if nothing is left to do.

    If the run continues, a missing next job is queued, and one that waits is kept off bad nodes.
    Return the exit code: then 0, or `CAN_GO_ON` without a next job; else the verdict's own.
    Refusals of Slurm are printed. Raise OSError if the run's folder can't be read or written.
    """
    link = attempt.link
    if decided.action == Action.REQUEUE:
        if link and facts.bad_nodes:
            keep_off(run, link.id, _last_moment(attempt, environ))
        link = link or queue_next_link(run, attempt, environ, _last_moment(attempt, environ))
        return 0 if link else _left_to_the_user(run)
    if link and decided.cause != Cause.SUPERSEDED:
        try:
            slurm.cancel([link.id])
        except HpcDdpError as error:  # it will find the verdict, and not start
            say(error.message)
    return decided.exit_code
