"""Jobs that follow one another: a chain, whose next job is queued while this one runs.

Whether a job is to run at all is decided here, too: a link finds the end of the one before it.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.task_folder import job_folder
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.journal.events import VerdictGiven
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import link_job
from hpc_ddp.node.outcome.requeue import kept_variables
from hpc_ddp.node.outcome.requeue.excluded_nodes import excluded_nodes
from hpc_ddp.slurm_text import CANCELLED, OVER, Job

# By these sbatch may send the next job to another cluster than this job's.
CLUSTERS_OF_SUBMIT = ("SLURM_CLUSTERS", "SBATCH_CLUSTERS")
TAKEN_AWAY = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")  # states of a job that Slurm has ended


def own_id(environ: Mapping[str, str]) -> str:
    """Return the id by which a command of Slurm changes this job and no other one: for a task of an
    array ``ARRAY_INDEX``. The last task's SLURM_JOB_ID is also the id of the whole array: a requeue
    by that id restarts all tasks, those that run and those that have finished. Raises KeyError
    outside of a job."""
    task = environ.get("SLURM_ARRAY_TASK_ID")
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else environ["SLURM_JOB_ID"]


def is_link(run: RunFolder, job: JobRef) -> bool:
    """Return whether the run has noted a job as a link: a job that the job before it has queued,
    and not a person. Raises OSError where the run's folder can't be read."""
    return job.is_among(run.links())


def record_late_link(run: RunFolder, job: JobRef, environ: Mapping[str, str]) -> None:
    """Record this job, `job`, as the link of its predecessor (`_predecessor_of_late_link`), if that
    queued this job and was killed before its sbatch answered; else do nothing.

    The record is the newest attempt's ``next.json`` if that attempt is the predecessor's, else an
    entry of ``early-links.json``. In a task of an array the newest attempt counts as the
    predecessor's: attempts do not note the id ``ARRAY_INDEX``. Raises OSError if the run's folder
    can't be read or written.
    """
    predecessor = _predecessor_of_late_link(run, job, environ)
    if predecessor is None:
        return
    is_of_array = "_" in predecessor
    attempts = run.attempts()
    if attempts and (is_of_array or attempts[-1].info.get("job_id") == predecessor):
        _write_link(run, attempts[-1].path / "next.json", {"job_id": str(job)})
    else:
        _write_link(run, run.early_links, {**read_json(run.early_links), predecessor: str(job)})


def _write_link(run: RunFolder, path: Path, link: dict[str, Any]) -> None:
    """Write a file of `run` that names a next job; where the disk has no room for it, the parcel of
    ``--stage`` is removed. Raise OSError where the disk still refuses."""
    run.make_room_for("a chain's next job", partial(write_json, path, link))


def _predecessor_of_late_link(
    run: RunFolder, job: JobRef, environ: Mapping[str, str]
) -> str | None:
    """Return the id of the run's job that has queued this one, `job`, and could not note it, by
    SLURM_JOB_DEPENDENCY; of a task ``ARRAY_INDEX``. None where there is none, or where the run
    knows `job` already, as it knows each job that a person has submitted. Raises OSError if the
    run's folder can't be read."""
    waited_for = environ.get("SLURM_JOB_DEPENDENCY", "")
    index = f"_{environ['SLURM_ARRAY_TASK_ID']}" if environ.get("SLURM_ARRAY_TASK_ID") else ""
    # The only form in which `_queue_link` makes a job wait: group 1 is the id, 2 without the index.
    dependency = re.fullmatch(rf"afterany:((\d+){index})(,singleton)?", waited_for)
    if not dependency:
        return None
    jobs = run.jobs(run.events())
    if index:
        array = RunFolder(run.whole)
        jobs += array.jobs(array.events())
    is_late = JobRef(dependency[2]).is_among(jobs) and not job.is_among(jobs)
    return dependency[1] if is_late else None


def admit_job(
    run: RunFolder, restarts: int, is_link: bool, job: JobRef, array: JobRef | None = None
) -> None:
    """Let a job of a run start, or refuse it by an HpcDdpError: its run was cancelled or given up,
    and no person has queued the job after that.

    The first start (`restarts` is 0) of a job that is no link (`is_link`) shows that a person wants
    to go on: the marks ``cancelled`` of the run and of its array are then deleted. `array` is the
    array's job if `job` is one of its tasks, else None.

    Raises
    ------
    HpcDdpError
        the run was cancelled, and Slurm or an earlier job has started this job; the chain before a
        link has ended, or how it has ended can't be known; or, at a first start, a mark
        ``cancelled`` names `job` or `array`
    OSError
        the run's folder can't be read or changed
    """
    if not restarts and not is_link:
        for folder in (run, RunFolder(run.whole)):
            _delete_cancel_mark(folder, job, array)
    elif run.cancelled.exists() or (is_link and _chain_has_ended(run, job)):
        raise HpcDdpError(f"run {run.path} was cancelled, or given up")


def _delete_cancel_mark(folder: RunFolder, job: JobRef, array: JobRef | None) -> None:
    """Delete the file ``cancelled`` in the folder of a run or an array, if it exists. Raise
    HpcDdpError, and leave the file, if it names `job` or `array`: a cancel has found the job while
    that started. Raise OSError where the disk refuses."""
    names = read_json(folder.cancelled).get("jobs", ())
    jobs = [JobRef.parse(str(name)) for name in names]
    if job.is_among(jobs) or (array and array.is_among(jobs)):
        raise HpcDdpError(f"job {job.id} was cancelled as it started")
    if folder.cancelled.exists():  # a read-only disk refuses to remove even a missing file
        folder.cancelled.unlink(missing_ok=True)


def _chain_has_ended(run: RunFolder, link: JobRef) -> bool:
    """Return whether the chain has ended with the job before `link`, which could not cancel `link`.

    A job that has begun no attempt, as by a set-up line that fails, ends the chain, unless Slurm
    ended it (`TAKEN_AWAY`), or its start came to nothing (``vain-jobs.json``).
    A job of the newest attempt ends it by a verdict that gives up or has the cause cancelled, or,
    without a verdict, where Slurm says that the job was cancelled. False without an attempt. Raises
    HpcDdpError as `_end_state`, OSError where the run's folder can't be read.
    """
    early = read_json(run.early_links).items()  # with jobs that are still in their set-up lines
    before = next((id for id, job in early if link.is_same(JobRef.parse(str(job)))), None)
    if before:
        state = _end_state(run, before)
        return (
            state == "CANCELLED" if before in read_json(run.vain_jobs) else state not in TAKEN_AWAY
        )
    attempts = run.attempts()
    if not attempts:
        return False
    verdict = last_event(run.events(), VerdictGiven)
    if verdict and verdict.attempt == attempts[-1].number:
        return verdict.cause == Cause.CANCELLED or verdict.action == Action.GIVE_UP
    last_id = str(attempts[-1].info.get("job_id") or "")
    return bool(last_id) and _end_state(run, last_id) == "CANCELLED"


def _end_state(run: RunFolder, job_id: str) -> str:
    """Return Slurm's state in which the job `job_id`, the one before a link, has ended. A hint of
    the error names `run`.

    The controller forgets a job after MinJobAge (300 s by default), and then the accounting is
    asked. A silent controller is waited for without end. Raises HpcDdpError where neither has an
    answer: the job may have been cancelled as well as preempted.
    """
    try:
        return slurm.show_job(job_id, give_up=math.inf).state
    except HpcDdpError:
        try:
            return slurm.find_record(job_id).state
        except HpcDdpError as error:
            raise HpcDdpError(
                f"how job {job_id}, which has queued this one, has ended is not known any more, so"
                f" that it may have been cancelled: {error.message}",
                hint=f"hpc-ddp submit --run {run.quoted} goes on",
            ) from None


def early_end_of(link: JobRef, give_up: float) -> str:
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
        with contextlib.suppress(HpcDdpError):
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


def queue_next_early(
    run: RunFolder, environ: Mapping[str, str], give_up: float | None = None
) -> JobRef | None:
    """Queue the run's next job where this job has begun no attempt: before its set-up lines, in
    which a preemption may end it, or after a start in vain. Return the new job, noted in
    ``early-links.json``, unless the disk refuses that: it then notes itself (`record_late_link`).

    None where Slurm refuses it, or does not answer, as `_queue_link`; this is printed. Raises
    OSError if the run's journal can't be read, KeyError outside of a job.
    """
    link = _queue_link(run, environ, give_up)
    if link:
        early = {**read_json(run.early_links), environ["SLURM_JOB_ID"]: str(link)}
        with contextlib.suppress(OSError):
            _write_link(run, run.early_links, early)
    return link


def cancel_next_early(run: RunFolder, environ: Mapping[str, str]) -> None:
    """Cancel the next job that `queue_next_early` has queued, if there is one, and remove it from
    ``early-links.json``: this job is not to start.

    A refused scancel is passed over: the next job finds at its start that it is not wanted. Raises
    OSError if ``early-links.json`` can't be written; the next job is then not cancelled. Raises
    KeyError outside of a job.
    """
    early = read_json(run.early_links)
    link = early.pop(environ["SLURM_JOB_ID"], None)
    if link:
        write_json(run.early_links, early)
        with contextlib.suppress(HpcDdpError):
            slurm.cancel([JobRef.parse(link).id])


def end_by_setup(run: RunFolder, environ: Mapping[str, str], job: Job | None) -> None:
    """Print that a set-up line has ended the job with code 0, and cancel the next job that
    `queue_next_early` has queued; do nothing where Slurm ends the job, whose batch shell then has
    the code of the command before. `job` is Slurm's record of it; None, without an answer, may be
    that. Raises as `cancel_next_early`."""
    if job and job.state == "RUNNING" and not job.preempted:
        say("a set-up line has ended the job, with code 0: nothing was started")
        cancel_next_early(run, environ)


def queue_next_link(
    run: RunFolder, attempt: AttemptFolder, environ: Mapping[str, str], give_up: float | None = None
) -> JobRef | None:
    """Queue the chain's next job, unless `queue_next_early` has queued it; return that job. Write
    its id into the attempt's ``next.json``.

    Each job of a chain calls this at its start, since it may be killed at its end. A job calls it
    at its end where Slurm has refused its requeue, or its chain has no next job. None where Slurm
    refuses the new job, or does not answer until `give_up`, by ``time.monotonic()`` (None: for two
    minutes); the reason is printed. Raises OSError if the run's folder can't be read or written,
    KeyError outside of a job.
    """
    queued = read_json(run.early_links).get(environ["SLURM_JOB_ID"])
    link = JobRef.parse(queued) if queued else _queue_link(run, environ, give_up)
    if link:
        _write_link(run, attempt.path / "next.json", {"job_id": str(link)})
    return link


def record_vain_start(run: RunFolder, environ: Mapping[str, str], is_counted: bool) -> int:
    """Record in ``vain-jobs.json`` that a start of this job has come to nothing by no fault of its
    run, so that the next job, which finds this one ended before an attempt, goes on. Return how
    many starts that count have come to nothing since the run's newest attempt, with this one if
    `is_counted`. Raises OSError if the file can't be read or written, KeyError outside of a job."""
    jobs, job_id = read_json(run.vain_jobs), environ["SLURM_JOB_ID"]
    jobs[job_id] = int(jobs.get(job_id, 0)) + is_counted
    _write_link(run, run.vain_jobs, jobs)
    return sum(map(int, jobs.values()))


def forget_early_links(run: RunFolder) -> None:
    """Delete the records of jobs that have begun no attempt, now that one has begun. Raise OSError
    where the disk refuses."""
    run.early_links.unlink(missing_ok=True)
    run.vain_jobs.unlink(missing_ok=True)
    run.pauses.unlink(missing_ok=True)


def _queue_link(
    run: RunFolder, environ: Mapping[str, str], give_up: float | None = None
) -> JobRef | None:
    """Submit the job's script (`job_folder`) once more, on this job's cluster and off blamed nodes;
    return the new job, which starts after this one has ended. In a task of an array the new job has
    this task alone. The new job is noted in the index of runs (`link_job`).

    None where Slurm refuses the job, or does not answer until `give_up` (see `slurm.sbatch`); the
    reason is printed. The script's ``--hold`` or ``--begin`` was for the first job, and is undone;
    a hold that can't be released by `give_up` is printed. Raises OSError if a journal of the run
    can't be read, KeyError outside of a job.
    """
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    shell = kept_variables.env_before_setup(environ).items()
    env = {name: text for name, text in shell if name not in CLUSTERS_OF_SUBMIT}
    script, array = job_folder(run).script, RunFolder(run.whole)
    script_options = slurm.options_of(script)
    options = _options_of_next(run, environ, script_options, give_up)
    try:
        link = slurm.sbatch(
            script,
            env,
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
    if "hold" in script_options:
        try:
            slurm.release(link, give_up)
        except HpcDdpError as error:
            say(f"{error.message}; the next job waits for: scontrol release {link.id}")
    return link


def _options_of_next(
    run: RunFolder,
    environ: Mapping[str, str],
    script_options: dict[str, str],
    give_up: float | None,
) -> list[str]:
    """Return the options of sbatch with which the next job differs from its script, whose own are
    `script_options`: it waits for this job's end, is kept off blamed nodes (`excluded_nodes`, which
    waits for Slurm until `give_up`), has this task alone, and waits for no time. A ``singleton``
    among the script's dependencies is kept."""
    # Slurm separates dependencies by a comma, or by a question mark where one of them is enough.
    is_single = "singleton" in re.split("[,?]", script_options.get("dependency", ""))
    options = [f"--dependency=afterany:{own_id(environ)}{',singleton' * is_single}"]
    kept_off = excluded_nodes(run, own_id(environ), give_up)
    if kept_off:
        options.append(f"--exclude={','.join(kept_off)}")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    if task:
        options.append(f"--array={task}")
    if "begin" in script_options:
        options.append("--begin=now")
    return options


def command_to_go_on(environ: Mapping[str, str]) -> str:
    """Return the command by which the user continues the run of this job; of an array without a
    folder of this task that of the array."""
    run = Path(environ.get("HPC_DDP_RUN", "RUN"))
    task = run / f"task-{environ.get('SLURM_ARRAY_TASK_ID')}"
    return f"hpc-ddp submit --run {shlex.quote(str(task if task.is_dir() else run))}"


def leave_to_the_user(environ: Mapping[str, str]) -> int:
    """Print the command by which the user continues the run; return the exit code `CAN_GO_ON`."""
    say(f"to go on: {command_to_go_on(environ)}")
    return CAN_GO_ON
