"""What the batch shell asks for: the attempt's facts before the step, the verdict after it.

``python <run>/lib/node.py batch begin | warned | interrupted | next-port | verdict``

It runs on the first node, outside of any container, since scontrol is often missing inside.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.node.network import FIRST_PORT, LAST_PORT, free_port
from hpc_ddp.node.verdict import Facts, Verdict, decide
from hpc_ddp.run import process
from hpc_ddp.run.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.run.folder import AttemptFolder, RunFolder, link_job, read_json, write_json
from hpc_ddp.run.journal import Event
from hpc_ddp.run.patience import patiently
from hpc_ddp.run.spec import JobSpec

REQUEUE_TRIES = 6


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # the job's output may lie on a disk that is full
        os.write(2, f"hpc-ddp: {text}\n".encode())


# --- before the step -----------------------------------------------------------------------


def begin(environ: dict[str, str]) -> dict[str, str] | None:
    """Take the next attempt's number and return what the step needs, as variables.

    None means that the run is finished already and there is nothing left to do.

    Raises
    ------
    HpcDdpError
        the run is finished, cancelled, or being run by somebody else
    """
    run, job_id = _run_of(environ), environ["SLURM_JOB_ID"]
    spec = JobSpec.from_json(patiently(run.job_json.read_text))
    restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
    is_link = "HPC_DDP_LINK" in environ
    if run.finished():
        if restarts or is_link:  # Slurm may restart a job that was just through
            return None
        raise HpcDdpError(f"run {run.path} is finished", hint="start a new one: hpc-ddp submit")
    _check_wanted(run, restarts, is_link)
    job = _ask(job_id)
    nodes = slurm.expand_hosts(environ["SLURM_JOB_NODELIST"])
    info = {"job_id": job_id, "restarts": restarts, "host": socket.gethostname()}
    is_live = partial(_is_live, job_id=job_id, restarts=restarts)
    attempt = patiently(partial(run.claim_attempt, info, is_live))
    run.journal("batch", attempt.number).write("started", nodes=nodes, **info)
    if "SLURM_ARRAY_TASK_ID" not in environ:  # an array's own id was linked at the submit
        link_job(job_id, run)
    if spec.continue_by == "resubmit":
        _queue_next_link(run, attempt, job_id, environ)
    return {
        "HPC_DDP_RUN": str(run.path),
        "HPC_DDP_RESTARTS": str(restarts),
        "HPC_DDP_HEAD": nodes[0] + spec.host_suffix,
        "HPC_DDP_PORT": str(free_port(_first_port(job_id))),
        **variables(attempt, nodes, job_id, job.end_time if job else None, spec.warn_s),
    }


def variables(
    attempt: AttemptFolder, nodes: list[str], id: str, end: float | None, warn_s: int
) -> dict[str, str]:
    """Return what the supervisors of any attempt are told.

    `id` is unique among what runs now; `end` is in unix seconds, None without a limit. The
    nodes are warned `warn_s` seconds before it, or in the last tenth of a shorter attempt.
    """
    return {
        "HPC_DDP_ATTEMPT": str(attempt.number),
        "HPC_DDP_NODES": " ".join(nodes),
        "HPC_DDP_NNODES": str(len(nodes)),
        "HPC_DDP_RDZV_ID": f"{id}.{attempt.number}",
        "HPC_DDP_END_TIME": f"{end:.0f}" if end else "",
        "HPC_DDP_WARN_S": f"{min(warn_s, (end - time.time()) / 10):.0f}" if end else "",
    }


def _run_of(environ: dict[str, str]) -> RunFolder:
    """Return the run: the one that the script names, or an array task's own below it."""
    run = RunFolder(Path(environ["HPC_DDP_RUN"]))
    task = environ.get("SLURM_ARRAY_TASK_ID")
    if not task or run.path.name == f"task-{task}":
        return run
    own = RunFolder(run.path / f"task-{task}").make()
    own.job_json.write_text(run.job_json.read_text())
    for shared in ("lib", "cancelled"):  # one cancel ends all tasks
        link = own.path / shared
        if not link.is_symlink():
            link.symlink_to(Path("..") / shared)
    return own


def _check_wanted(run: RunFolder, restarts: int, is_link: bool) -> None:
    if not restarts and not is_link:  # whoever submits a cancelled run wants it to go on
        run.cancelled.unlink(missing_ok=True)
    elif run.cancelled.exists() or (is_link and _chain_has_ended(run)):
        raise HpcDdpError(f"run {run.path} was cancelled, or given up")


def _chain_has_ended(run: RunFolder) -> bool:
    """Tell whether the job before this link was the last one, though it could not cancel this.

    A scancel may end that job before its verdict comes to it.
    """
    verdicts = [event for event in run.events() if event["event"] == "verdict"]
    attempts = run.attempts()
    if not attempts:
        return False
    if verdicts and verdicts[-1]["attempt"] == attempts[-1].number:
        return {"cancelled", "give up"} & {verdicts[-1]["cause"], verdicts[-1]["action"]} != set()
    job_id = attempts[-1].info.get("job_id")
    job = _ask(job_id) if job_id else None
    return job is not None and job.state == "CANCELLED" and not job.preempted


def _is_live(other: dict[str, Any], job_id: str, restarts: int) -> bool:
    """Tell whether the attempt that `other` describes still runs; the caller is job `job_id`."""
    theirs = other.get("job_id")
    if not theirs:
        return process.is_live(other)
    if theirs == job_id:
        return False  # an earlier start of this very job
    for pause_s in (1, 5, None):
        try:
            job = slurm.show_job(theirs)
            break
        except HpcDdpError as error:
            if "Invalid job id" in error.message:
                return False
            if pause_s is None:
                raise
            time.sleep(pause_s)
    return job.state in ("RUNNING", "SUSPENDED") and job.restarts == other.get("restarts")


def _queue_next_link(
    run: RunFolder, attempt: AttemptFolder, job_id: str, environ: dict[str, str]
) -> None:
    """Queue the chain's next job now: at the end nobody may be left to do it."""
    env = dict(environ, HPC_DDP_LINK="1")
    try:
        link = slurm.sbatch(str(run.script), env, f"--dependency=afterany:{job_id}")
    except HpcDdpError as error:
        say(f"the next job of the chain could not be queued yet: {error.message}")
        return
    write_json(attempt.path / "next.json", {"job_id": link})
    link_job(link, run)


def _first_port(job_id: str) -> int:
    """Spread jobs over the port range, so that two on one node rarely try the same."""
    return FIRST_PORT + int(job_id) * 7 % (LAST_PORT - FIRST_PORT)


def _ask(job_id: str) -> slurm.Job | None:
    try:
        return slurm.show_job(job_id)
    except HpcDdpError as error:
        say(error.message)
        return None


def export_lines(values: dict[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


# --- while the step runs -------------------------------------------------------------------


def warned(environ: dict[str, str]) -> None:
    """Pass the warning signal on to the nodes, as a word in a file that they look at.

    Slurm may send it up to a minute early, and at a preemption too where the site says so.
    """
    job = _ask(environ["SLURM_JOB_ID"])
    if job and job.end_time and not job.preempted:
        warn_s = float(environ["HPC_DDP_WARN_S"] or 0)
        time.sleep(max(0.0, job.end_time - warn_s - time.time()))
    preempted = job is not None and job.preempted
    attempt_of(environ).notice.write_text("preemption" if preempted else "warning signal")


def next_port(environ: dict[str, str]) -> int:
    """Clear away a start whose port was taken, and return another port to try."""
    attempt = attempt_of(environ)
    attempt.failed.write_text("")
    for node in attempt.nodes():
        node.record.unlink(missing_ok=True)
    attempt.port_taken.unlink()
    return free_port(int(environ["HPC_DDP_PORT"]) + 1)


def attempt_of(environ: dict[str, str]) -> AttemptFolder:
    run = RunFolder(Path(environ["HPC_DDP_RUN"]))
    return run.attempt(int(environ["HPC_DDP_ATTEMPT"]))


# --- after the step ------------------------------------------------------------------------


def verdict(environ: dict[str, str]) -> int:
    """Decide how it goes on, journal it, do it; return the exit code for the batch script."""
    run, attempt = RunFolder(Path(environ["HPC_DDP_RUN"])), attempt_of(environ)
    facts, decided = judge(run, attempt, environ, _ask(environ["SLURM_JOB_ID"]))
    if facts.spec.continue_by == "resubmit":
        if decided.action == "requeue" and not (attempt.path / "next.json").exists():
            _queue_next_link(run, attempt, environ["SLURM_JOB_ID"], environ)
        return _end_link(attempt, decided)
    if decided.action != "requeue":
        return decided.exit_code
    if "HPC_DDP_INTERACTIVE" in environ:  # an allocation is not a batch job: nothing to requeue
        say(f"go on with: hpc-ddp submit --backend allocation --run {shlex.quote(str(run.path))}")
        return CAN_GO_ON
    return _requeue(run, environ["SLURM_JOB_ID"], facts)


def judge(
    run: RunFolder, attempt: AttemptFolder, environ: dict[str, str], job: slurm.Job | None
) -> tuple[Facts, Verdict]:
    """Gather the facts of an attempt that has ended, decide how it goes on, and note it."""
    facts = Facts(
        spec=JobSpec.from_json(patiently(run.job_json.read_text)),
        attempt=attempt.number,
        cancelled=run.cancelled.exists(),
        superseded=not run.is_newest(attempt.number),
        job=job,
        restarts=int(environ.get("HPC_DDP_RESTARTS") or 0),
        nodes=environ["HPC_DDP_NODES"].split(),
        records=attempt.records(),
        events=_since_submit(run.events()),
    )
    decided = decide(facts)
    _note(run, attempt, facts, decided)
    return facts, decided


def _since_submit(events: list[Event]) -> list[Event]:
    """Drop what lies before the newest submit: mended code has its budgets anew.

    By attempt and not by time, since the login node's clock is another one.
    """
    first = max((e.get("first_attempt", 0) for e in events if e["event"] == "submitted"), default=0)
    return [event for event in events if event["attempt"] >= first]


def _note(run: RunFolder, attempt: AttemptFolder, facts: Facts, decided: Verdict) -> None:
    """Write the verdict to the journal, and for people to the job's output.

    The output ends with what went wrong, where people look first.
    """
    failure = facts.failure if decided.cause == "failed" else None
    where: dict[str, Any] = {}
    if failure:
        where = {"rank": failure.rank, "node": failure.node, "error": failure.error}
    run.journal("batch", attempt.number).write_surely(
        "verdict",
        cause=decided.cause,
        action=decided.action,
        why=decided.why,
        exit_code=decided.exit_code,
        progress=facts.progress,
        step=facts.step,
        **where,
    )
    if failure and failure.rank is not None:
        say(f"its log: {attempt.node(failure.node).rank_log(failure.rank)}")
    if decided.action == "none":
        say(f"attempt {facts.attempt}: {decided.why or decided.cause}")
    else:
        then = "it goes on" if decided.action == "requeue" else "given up"
        say(f"attempt {facts.attempt}: {decided.why}; {then}")


def _requeue(run: RunFolder, job_id: str, facts: Facts) -> int:
    """Requeue the job, if it still is ours to requeue; Slurm then ends the batch shell, too.

    A requeue goes by job id. The shell of an attempt that a node failure has cut off would
    hit its own successor with it, or bring a cancelled job back to life: so ask before each
    try whether the job still is in this very attempt.
    """
    for pause_s in range(REQUEUE_TRIES):
        time.sleep(pause_s)
        job = _ask(job_id)
        if job is None:
            continue
        if job.restarts != facts.restarts or not run.is_newest(facts.attempt):
            say(f"attempt {facts.attempt} is no longer the job's current one: left alone")
            return 0
        if run.cancelled.exists() or not (job.state == "RUNNING" or job.reason == "TimeLimit"):
            say(f"the job is {job.state} by now: not requeued")
            return CAN_GO_ON
        try:
            slurm.requeue(job_id)
        except HpcDdpError as error:
            say(error.message)
            continue
        return 0  # at once: Slurm would wait KillWait for a shell that lives on
    say(f"could not requeue; go on with: hpc-ddp submit --run {shlex.quote(str(run.path))}")
    return CAN_GO_ON


def _end_link(attempt: AttemptFolder, decided: Verdict) -> int:
    """End one job of a chain: the next one waits already, unless there is nothing left to do."""
    link = read_json(attempt.path / "next.json").get("job_id")
    if decided.action == "requeue":
        return 0 if link else CAN_GO_ON
    if link and decided.cause != "superseded":
        try:
            slurm.cancel([link])
        except HpcDdpError as error:  # it will find the verdict, and not start
            say(error.message)
    return decided.exit_code


def main(argv: list[str]) -> int:
    environ = dict(os.environ)
    try:
        match argv:
            case ["begin"]:
                values = begin(environ)
                print("exit 0" if values is None else export_lines(values))
            case ["interrupted"]:
                attempt_of(environ).notice.write_text("interrupted")
            case ["warned"]:
                warned(environ)
            case ["next-port"]:
                print(next_port(environ))
            case ["verdict"]:
                return verdict(environ)
            case _:
                say(f"unknown call {argv}")
                return 2
    except HpcDdpError as error:
        say(error.message)
        if error.hint:
            say(f"hint: {error.hint}")
        return error.exit_code
    except OSError as error:
        say(f"the run's folder can't be used: {error}; once it can: hpc-ddp submit --run RUN")
        return CAN_GO_ON
    return 0
