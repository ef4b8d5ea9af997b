"""Jobs that follow one another: a chain, whose next job is queued while this one runs.

Whether a job is to run at all is decided here, too: a link finds the end of the one before it.
"""

from __future__ import annotations

import contextlib
import math
import re

from hpc_ddp import slurm
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.task_folder import job_folder
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.journal.events import VerdictGiven
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import link_job
from hpc_ddp.node.outcome import first_job
from hpc_ddp.node.outcome.excluded_nodes import excluded_nodes

CLUSTERS_OF_SUBMIT = ("SLURM_CLUSTERS", "SBATCH_CLUSTERS")
TAKEN_AWAY = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")  # states of a job that Slurm has ended


def own_id(environ: dict[str, str]) -> str:
    """Return the id by which a command of Slurm changes this job and no other one: for a task of an
    array ``ARRAY_INDEX``. The last task's SLURM_JOB_ID is also the id of the whole array: a requeue
    by that number restarts all tasks, those that run and those that have finished. Raises KeyError
    outside of a job."""
    task = environ.get("SLURM_ARRAY_TASK_ID")
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else environ["SLURM_JOB_ID"]


def is_link(run: RunFolder, job: JobRef) -> bool:
    """Return whether the run has noted a job as a link: one that the job before it has queued, and
    not a person. Raises OSError where the run's folder can't be read."""
    return job.is_among(run.links())


def record_late_link(run: RunFolder, job: JobRef, environ: dict[str, str]) -> None:
    """Record this job, `job`, as the link of the earlier job that it waited for
    (SLURM_JOB_DEPENDENCY), if the run does not know this job yet: the earlier job was then killed
    before its sbatch answered. The record is the newest attempt's ``next.json`` if that attempt
    belongs to the earlier job, else ``early-links.json``. The run knows each job that a person has
    submitted.

    For a task of an array the earlier job is ``ARRAY_INDEX``, which no attempt is noted with: its
    newest attempt counts as of that job. Raises OSError if the run's folder can't be read or
    written.
    """
    waited_for = environ.get("SLURM_JOB_DEPENDENCY", "")
    index = f"_{environ['SLURM_ARRAY_TASK_ID']}" if environ.get("SLURM_ARRAY_TASK_ID") else ""
    dependency = re.fullmatch(rf"afterany:((\d+){index})(,singleton)?", waited_for)
    jobs = run.jobs(run.events())
    of_array = RunFolder(run.whole)
    if dependency and index:
        jobs += of_array.jobs(of_array.events())
    if not dependency or job.is_among(jobs) or not JobRef(dependency[2]).is_among(jobs):
        return
    attempts = run.attempts()
    if attempts and (index or attempts[-1].info.get("job_id") == dependency[1]):
        write_json(attempts[-1].path / "next.json", {"job_id": str(job)})
    else:
        write_json(run.early_links, {**read_json(run.early_links), dependency[1]: str(job)})


def check_wanted(
    run: RunFolder, restarts: int, is_link: bool, job: JobRef, array: JobRef | None = None
) -> None:
    """Refuse a job by an HpcDdpError if its run was cancelled or given up, unless a person has
    queued the job after that. `array` is the array's job if `job` is one of its tasks, else None.

    The first start (`restarts` is 0) of a job that is no link (`is_link`) shows that a person wants
    to go on: the marks ``cancelled`` of the run and of its array are then deleted, unless they name
    `job` or `array`.

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
            if job.is_among(marked) or (array and array.is_among(marked)):
                raise HpcDdpError(f"job {job.id} was cancelled as it started")
            if folder.cancelled.exists():  # a disk that is read-only refuses to remove nothing
                folder.cancelled.unlink(missing_ok=True)
    elif run.cancelled.exists() or (is_link and _chain_has_ended(run, job)):
        raise HpcDdpError(f"run {run.path} was cancelled, or given up")


def _chain_has_ended(run: RunFolder, link: JobRef) -> bool:
    """Return whether the chain was to end with the job before `link`, which could not cancel the
    link. True where that job's verdict gives up or says that it was cancelled; without a verdict,
    where Slurm says that it was cancelled.

    A job that has ended in its set-up lines ends the chain, unless Slurm ended it (`TAKEN_AWAY`).
    Raises HpcDdpError as `_end_state`, OSError where the journal can't be read.
    """
    early = read_json(run.early_links)
    before = next((id for id, job in early.items() if link.is_same(JobRef.parse(str(job)))), None)
    if before:
        return _end_state(run, before) not in TAKEN_AWAY
    attempts = run.attempts()
    if not attempts:
        return False
    last = last_event(run.events(), VerdictGiven)
    if last and last.attempt == attempts[-1].number:
        return last.cause == Cause.CANCELLED or last.action == Action.GIVE_UP
    last_id = str(attempts[-1].info.get("job_id") or "")
    return bool(last_id) and _end_state(run, last_id) == "CANCELLED"


def _end_state(run: RunFolder, job_id: str) -> str:
    """Return Slurm's state in which the job before a link has ended.

    The controller forgets a job after MinJobAge (300 s by default), and then the accounting is
    asked. A silent controller is waited for without end. Raises HpcDdpError where neither knows the
    job: it may have been cancelled as well as preempted.
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


def queue_early(run: RunFolder, environ: dict[str, str]) -> None:
    """Queue the chain's next job before this job's set-up lines run, and note it in
    ``early-links.json``: a preemption in the set-up lines would end this job.

    A refusal of Slurm is printed, and nothing is noted. Raises OSError if the run's journal can't
    be read, or if ``early-links.json`` can't be written; in the latter case the job is queued.
    """
    link = _queue_link(run, environ)
    if link:
        early = {**read_json(run.early_links), environ["SLURM_JOB_ID"]: str(link)}
        write_json(run.early_links, early)


def take_back_early(run: RunFolder, environ: dict[str, str]) -> None:
    """Cancel the next job that `queue_early` has queued, if there is one, and remove it from
    ``early-links.json``: this job is not to start.

    A refused scancel is passed over: the next job finds at its start that it is not wanted. Raises
    OSError if ``early-links.json`` can't be written; the next job is then not cancelled.
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
    """Queue the chain's next job, or take the one that `queue_early` has queued; write its id into
    the attempt's ``next.json``, and return it. ``early-links.json`` is deleted in any case.

    Each job of a chain calls this at its start, since it may be killed at its end, and a job whose
    requeue Slurm refuses calls it at its end. None where Slurm refuses the next job, or does not
    answer until `give_up` (by `time.monotonic`, see `slurm.show_job`); the reason is printed.
    Raises OSError if the run's folder can't be read or written, KeyError outside of a job.
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
    """Submit the job's script (`job_folder`) once more, on this job's cluster and off blamed nodes;
    return the new job, which starts after this one. The index of runs notes it as a job of the run.

    None where Slurm refuses the job, or does not answer until `give_up` (see `slurm.sbatch`); the
    reason is printed. The script's ``--hold`` or ``--begin`` was for the first job, and is undone;
    a refusal to release the hold is printed. Raises OSError if a journal of the run can't be read.
    """
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    shell = first_job.before_setup(environ).items()
    env = {name: text for name, text in shell if name not in CLUSTERS_OF_SUBMIT}
    script = job_folder(run).script
    script_options = slurm.options_of(script)
    is_single = "singleton" in re.split("[,?]", script_options.get("dependency", ""))
    options = [f"--dependency=afterany:{own_id(environ)}{',singleton' * is_single}"]
    kept_off = excluded_nodes(run, own_id(environ), give_up)
    if kept_off:
        options.append(f"--exclude={','.join(kept_off)}")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    array = RunFolder(run.whole)
    if task:
        options.append(f"--array={task}")
    if "begin" in script_options:
        options.append("--begin=now")
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
            slurm.release(link)
        except HpcDdpError as error:
            say(f"{error.message}; the next job waits for: scontrol release {link.id}")
    return link
