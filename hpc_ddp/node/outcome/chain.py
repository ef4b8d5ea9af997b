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
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.journal.events import VerdictGiven
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import link_job
from hpc_ddp.node.outcome.excluded_nodes import excluded_nodes

CLUSTERS_OF_SUBMIT = ("SLURM_CLUSTERS", "SBATCH_CLUSTERS")
TAKEN_AWAY = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")


def own_id(environ: dict[str, str]) -> str:
    """Return the id by which a command of Slurm changes this job and no other one.

    The number of an array's last task is that of the whole array, too: a requeue by it restarts all
    of its tasks, those that run and those that have finished. Raise KeyError outside of a job.
    """
    task = environ.get("SLURM_ARRAY_TASK_ID")
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else environ["SLURM_JOB_ID"]


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

    None where Slurm refuses it, which is printed. A ``--hold`` or ``--begin`` of the script was for
    the first job. `give_up` as `slurm.sbatch` has it. Raise OSError if a journal of the run can't
    be read.
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
    settled = slurm.options_of(array.script)
    if "begin" in settled:
        options.append("--begin=now")
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
    if "hold" in settled:
        try:
            slurm.release(link)
        except HpcDdpError as error:
            say(f"{error.message}; the next job waits for: scontrol release {link.id}")
    return link
