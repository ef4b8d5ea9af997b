"""Commands of the batch script: the attempt's variables before the step, the verdict after it.

``python <run>/lib/node.py batch COMMAND``, see `_call`. It runs on the first node, outside of any
container, since scontrol is often missing inside.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.core import process
from hpc_ddp.core.attempt_env import INTERACTIVE, AttemptEnv
from hpc_ddp.core.console.terminal import answer, say
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.file_io import patiently
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_values import least_cpus
from hpc_ddp.core.job.task_folder import job_folder, run_of_job
from hpc_ddp.core.job.trackers import tracker_env
from hpc_ddp.core.job.variables import export_lines
from hpc_ddp.core.journal.enums import Cause, NoticeSource
from hpc_ddp.core.journal.events import Started, TeardownBegun
from hpc_ddp.core.journal.journal import first_attempt
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import link_job
from hpc_ddp.live_jobs import is_attempt_live
from hpc_ddp.node.net.names_and_ports import first_port, free_port, reachable_name
from hpc_ddp.node.outcome.end_message import notify_of_end
from hpc_ddp.node.outcome.gather_facts import (
    enforce_budget,
    judge_attempt,
    limit_silent_ends,
    preview_cause,
)
from hpc_ddp.node.outcome.requeue import attempt_end, chain, kept_variables, vain_start
from hpc_ddp.node.outcome.requeue.job_change import JobChange, change_job
from hpc_ddp.node.outcome.requeue.next_start import MAY_BE_REQUEUED, VERDICT_S, ask_about_job
from hpc_ddp.node.watch import end_step
from hpc_ddp.node.watch.end_time import (
    attempt_of,
    end_of,
    end_time_at_start,
    give_notice_of_interrupt,
    give_warning,
    watch_end_time,
)
from hpc_ddp.node.workers.worker import die_with_parent

TEARDOWN_S = 300.0  # what a user's lines may take after a training that has not finished
MONTH_S = 3e6  # for a job without a time limit


def queue_next(environ: dict[str, str]) -> None:
    """Queue a chain's next job early: before this job's set-up lines. `begin` cancels the queued
    job if it refuses this job.

    No job is queued for a finished run, in an allocation (``salloc``), or by a job that Slurm has
    restarted, which has queued its next job at its first start. Further effects are those of
    `chain.record_late_link`, `chain.admit_job` (which may delete the mark ``cancelled``) and
    `enforce_budget` (a verdict and a message). A refusal of sbatch is printed. Raise HpcDdpError as
    these do, or for a broken job.json; OSError if the run's folder can't be read or written;
    KeyError outside of a job.
    """
    run, own_job = run_of_job(environ), _own_job(environ)
    restarts = attempt_end.count_restarts(environ)
    if run.finished() or restarts or INTERACTIVE in environ:
        return
    array = JobRef.of(environ.get("SLURM_ARRAY_JOB_ID"), own_job.cluster)
    chain.record_late_link(run, own_job, environ)
    is_link = chain.is_link(run, own_job)
    chain.admit_job(run, restarts, is_link, own_job, array)
    enforce_budget(run, JobSpec.from_json(patiently(run.job_json.read_bytes)))
    chain.queue_next_early(run, environ)


def begin(environ: dict[str, str]) -> dict[str, str] | None:
    """Begin the next attempt and return its variables, or None, as `_begin` does, with its effects
    and errors; after an HpcDdpError the job that `queue_next` has queued is cancelled."""
    try:
        return _begin(environ)
    except HpcDdpError:
        with contextlib.suppress(OSError):  # it must not hide the refusal
            chain.cancel_next_early(run_of_job(environ), environ)
        raise


def _begin(environ: dict[str, str]) -> dict[str, str] | None:
    """Begin the next attempt; return the variables for its supervisors: those of `AttemptEnv`,
    `kept_variables.variables` and `tracker_env`. None, and nothing begins, where the run is
    finished, and this job was restarted by Slurm or queued by another job.

    This makes the attempt's folder, journals `Started`, notes the job in the index of runs, queues
    a chain's next job, and prints a warning of `_check_cpus`; it may record this job as a link,
    delete the mark ``cancelled``, and journal a verdict. Raise HpcDdpError if the run is finished,
    cancelled, given up, over its budget, too often silent or runs already (Slurm is asked, and may
    refuse to answer), if its job.json is broken, or if Slurm does not expand the node list; OSError
    if the run's folder can't be used, or no port is free; KeyError outside of a job.
    """
    run, job_id = run_of_job(environ), environ["SLURM_JOB_ID"]
    spec = JobSpec.from_json(patiently(run.job_json.read_bytes))
    restarts = attempt_end.count_restarts(environ)
    own_job = _own_job(environ)
    cluster = slurm.own_cluster()
    if cluster and own_job.is_of(cluster):  # scontrol may ask another cluster than this node's
        own_job = replace(own_job, cluster=cluster)
    array = JobRef.of(environ.get("SLURM_ARRAY_JOB_ID"), own_job.cluster)
    patiently(partial(chain.record_late_link, run, own_job, environ))
    is_link = patiently(partial(chain.is_link, run, array or own_job))
    if patiently(run.finished):
        # No person has started it, as Slurm may restart a job at its end; or the teardown is left.
        if restarts or is_link or patiently(partial(run.lacks_teardown, spec.teardown)):
            return None
        raise HpcDdpError(f"run {run.path} is finished", hint="start a new one: hpc-ddp submit")
    patiently(partial(chain.admit_job, run, restarts, is_link, own_job, array))
    patiently(partial(enforce_budget, run, spec))
    patiently(partial(limit_silent_ends, run, spec))
    nodes = slurm.expand_hosts(environ["SLURM_JOB_NODELIST"])
    info: dict[str, Any] = {"job_id": job_id, "restarts": restarts, "host": socket.gethostname()}
    info |= {"nodes": nodes, "cluster": own_job.cluster or None}
    if INTERACTIVE in environ:  # the script leads a session
        info["shell"] = process.identity(os.getsid(0))
    is_live = partial(is_attempt_live, run, own_job)
    claim = partial(run.claim_attempt, info, is_live)
    attempt = patiently(partial(run.make_room_for, "an attempt", claim))
    run.journal("batch", attempt.number).write(Started(**info))
    if environ.get("SLURM_ARRAY_JOB_ID") != job_id:  # the array's own id is noted at the submit
        link_job(own_job, run)
    if spec.continue_by == "resubmit" and INTERACTIVE not in environ:
        chain.queue_next_link(run, attempt, environ)
    patiently(partial(chain.forget_early_links, run))
    job = ask_about_job(job_id)
    is_forbidden = job and not job.may_be_requeued and INTERACTIVE not in environ
    if is_forbidden and "requeue" in slurm.options_of(job_folder(run).script):  # by a site's plugin
        lost = "the loss of a node would end the run; hint: --continue-by resubmit: "
        change_job(chain.own_id(environ), [JobChange(MAY_BE_REQUEUED, refused=lost)])
    if job and job.preempted:  # in the set-up lines, say: Slurm signals no step that begins later
        patiently(partial(attempt.notice.write_text, NoticeSource.PREEMPTION))
    end = end_of(job)
    env = attempt_env(run, attempt, len(nodes), None if end == math.inf else end, spec)
    env = replace(
        env,
        restarts=restarts,
        head=reachable_name(nodes, 0, spec.host_suffix),
        port=free_port(first_port(job_id, env.run)),
        cpus=_check_cpus(spec, environ),
    )
    return _variables(run, env, environ)


def _variables(run: RunFolder, env: AttemptEnv, environ: dict[str, str]) -> dict[str, str]:
    """Return all variables of an attempt of `run`: those of `env`, `kept_variables.variables` and
    `tracker_env`. Raise as these do."""
    starts = env.attempt - env.first_attempt
    values = patiently(partial(kept_variables.variables, run, starts, environ))
    return env.to_env() | values | tracker_env(run, environ, env.first_attempt)


def _check_cpus(spec: JobSpec, environ: dict[str, str]) -> int:
    """Return the number of CPUs that the job has on its smallest node, 1 where Slurm does not say.
    Print a warning if it is less than the number of workers of a node."""
    cpus = least_cpus(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if cpus < spec.workers_per_node:
        say(
            f"the job has {cpus} CPU(s) on a node, and {spec.workers_per_node} workers there, which"
            f" will be slow; hint: --cpus-per-node {4 * spec.workers_per_node}"
        )
    return cpus


def attempt_env(
    run: RunFolder, attempt: AttemptFolder, nnodes: int, end_time: float | None, spec: JobSpec
) -> AttemptEnv:
    """Return the variables of an attempt on `nnodes` nodes, but for host, port, restarts and CPUs,
    which the caller adds. `end_time` is in unix seconds, None without a limit; nodes are warned
    ``warn_s`` seconds before it, or a tenth of the time from now on, if that is less. Raise OSError
    where the journal can't be read."""
    warn_s = min(spec.warn_s, (end_time - time.time()) / 10) if end_time else spec.warn_s
    return AttemptEnv(
        run=str(run.path),
        attempt=attempt.number,
        nnodes=nnodes,
        min_nodes=min(spec.least_nodes, nnodes),
        # One allocation may have two runs. torchrun names a folder by this.
        rdzv_id=f"{run.id.replace('/', '-')}.{attempt.number}",
        end_time=end_time,
        warn_s=warn_s,
        notice_signal=spec.notice_signal,
        fabric=spec.fabric,
        resume_args=spec.resume_args,
        resume_if=spec.resume_if,
        first_attempt=first_attempt(patiently(run.events)),
        warm_start=int(spec.warm_start),
    )


def _own_job(environ: dict[str, str]) -> JobRef:
    """Return the job of this process; raise KeyError outside of a job."""
    return JobRef(environ["SLURM_JOB_ID"], environ.get("SLURM_CLUSTER_NAME", ""))


def _watch_to_the_end(environ: dict[str, str], shell: int) -> None:
    """Run `watch_end_time`, and `end_step.guard_step` in a thread, until the batch shell, whose
    process id is `shell`, ends this process. Return only where `guard_step` can't use job.json."""
    guard = threading.Thread(target=end_step.guard_step, args=(environ, shell), daemon=True)
    guard.start()
    watch_end_time(environ)
    guard.join()


def next_port(environ: dict[str, str]) -> int:
    """Empty ``failed``, and delete the nodes' records and ``port-taken``, which a start of the
    attempt has left as its port was taken; return another port, free on this node. Raise OSError if
    the folder can't be changed, there is no ``port-taken``, or no port is free."""
    attempt = attempt_of(environ)
    attempt.failed.write_text("")
    for record in [path for node in attempt.nodes() for path in node.records()]:
        record.unlink(missing_ok=True)
    attempt.port_taken.unlink()
    return free_port(AttemptEnv.from_env(environ).port + 1)


def give_verdict(environ: dict[str, str]) -> int:
    """Decide how the run continues after an attempt, journal and print the verdict, carry it out
    (`attempt_end.carry_out_verdict`), and send the user's messages about it; delete the file of the
    environment from before the set-up lines. Return the exit code for the batch script.

    While the job is suspended, this waits first. Refusals of Slurm are printed, and show in the
    code. Raises as `judge_attempt`, and OSError for a run folder that can't be used."""
    env = AttemptEnv.from_env(environ)
    run, attempt = env.run_folder, env.attempt_folder
    job = attempt_end.await_settled_job(environ["SLURM_JOB_ID"])
    facts, verdict = judge_attempt(run, attempt, environ, job)
    notify_of_end(run, facts, verdict)
    code = attempt_end.carry_out_verdict(run, attempt, environ, facts, verdict)
    notify_of_end(run, facts, verdict, code)
    kept_variables.delete_env_before_setup(environ)
    return code


def plan_teardown(environ: dict[str, str]) -> str:
    """Return how many seconds, 1 or more, the user's lines after the training may take, and the
    cause of the verdict that will follow, as "300 preempted"; print a time below `TEARDOWN_S`.

    After a training that has finished there is time until `VERDICT_S` before the end of the job's
    time, or of a preemption's, as Slurm says, or else the note of the attempt's start; else
    `TEARDOWN_S` at most. Raises as `judge_attempt`."""
    job = ask_about_job(environ["SLURM_JOB_ID"])
    end_time = job.end_time if job and job.preempted else end_of(job)
    end = end_time_at_start(environ) if end_time is None else end_time
    left_s = end - VERDICT_S - time.time()
    run, attempt = run_of_job(environ), attempt_of(environ)
    cause = preview_cause(run, attempt, environ, job)
    with contextlib.suppress(
        OSError
    ):  # so that a preemption finds a script's end, see `is_finished`
        run.journal("batch", attempt.number).write(TeardownBegun(cause))
    if left_s < TEARDOWN_S:
        say(f"the teardown has {max(1, int(left_s))} s: the job's time is nearly over")
    most_s = MONTH_S if cause == Cause.FINISHED else TEARDOWN_S
    return f"{max(1, int(min(left_s, most_s)))} {cause.replace(' ', '-')}"


def lines_of_no_attempt(environ: dict[str, str]) -> str:
    """Return the bash lines of a job that starts no attempt: it ends with 0, after the teardown of
    a finished run if that was cut off, by a preemption or the time, with the variables of the last
    attempt; where it is cut off again, the job goes on again, or ends with the code of that. Raise
    OSError and UsageError where job.json can't be read."""
    run = run_of_job(environ)
    spec = JobSpec.from_json(run.job_json.read_bytes())
    if not run.lacks_teardown(spec.teardown):
        return "exit 0"
    say("the run is finished; its teardown was cut off, and is run again")
    end = end_of(ask_about_job(environ["SLURM_JOB_ID"])) or math.inf
    end_time = None if end == math.inf else end
    nodes = int(environ.get("SLURM_NNODES", "1"))
    newest = [run.attempt(0), *run.attempts()][-1]  # a user may have removed the logs
    env = attempt_env(run, newest, nodes, end_time, spec)
    values = {**_variables(run, env, environ), "HPC_DDP_VERDICT": "finished"}
    seconds = int(max(1, min(end - VERDICT_S - time.time(), MONTH_S)))
    cut_off = '[ -z "$_sigterm$_cut_off" ] || { _run_part batch cut-off; exit; }'
    return f"{export_lines(values)}\n_tear_down {seconds}\n{cut_off}\nexit 0"


def main(argv: list[str]) -> int:
    """Run the command of the batch script that `argv` names, see `_call`; return its exit code.

    The batch shell ends with the code of ``first-job``, ``begin``, ``verdict`` or ``failed`` where
    that is not 0: `attempt_end.prepare_failed_end` keeps Slurm from holding or requeueing such a
    job, if need be by another exit code."""
    environ = dict(os.environ)
    code = _call(argv, environ)
    if code and argv[:1] in (["first-job"], ["begin"], ["verdict"], ["failed"]):
        return attempt_end.prepare_failed_end(environ, code)
    return code


def _call(argv: list[str], environ: dict[str, str]) -> int:
    """Run the command of the batch script that `argv` names; return its exit code: that of the
    verdict for ``verdict``, 2 for an unknown name, else 0. An HpcDdpError, an OSError and the
    error of a damaged file are printed; the code is the error's own, `CAN_GO_ON`, or that of
    `vain_start.end_for_disk`. ``failed CODE`` is for set-up lines that have ended with CODE; with
    0, an end on purpose, a chain's next job is cancelled;
    ``cut-off`` is for a job that Slurm ends before its attempt; its code is 0 if the run goes on.

    ``begin`` and ``first-job`` print bash lines for the batch shell (``exit 0`` where there is
    nothing to do, or the job starts again), the latter `kept_variables.variables` for set-up lines;
    ``teardown-plan`` a number and a word, ``next-port`` a number. ``warned`` and ``watch`` end
    with the batch shell."""
    try:
        match argv:
            case ["first-job" | "begin"] if vain_start.keep_pause(environ):
                answer("exit 0")
            case ["first-job"]:
                run = run_of_job(environ)
                variables = partial(kept_variables.variables, run, None, environ)
                answer(export_lines(patiently(variables)))
            case ["queue-next"]:
                queue_next(environ)
            case ["failed", "0"]:
                job = ask_about_job(environ["SLURM_JOB_ID"], is_quiet=True)
                chain.end_by_setup(run_of_job(environ), environ, job)
            case ["failed", code]:
                return vain_start.go_on_after_failed_setup(environ, int(code))
            case ["cut-off"]:
                return vain_start.go_on_after_cut_off(environ)
            case ["begin"]:
                begun = begin(environ)
                answer(lines_of_no_attempt(environ) if begun is None else export_lines(begun))
            case ["interrupted"]:
                give_notice_of_interrupt(environ)
            case ["warned"]:
                die_with_parent()
                give_warning(environ)
            case ["watch", shell]:  # its id: a wrapper of Python may be this process's parent
                die_with_parent()
                _watch_to_the_end(environ, int(shell))
            case ["teardown-plan"]:
                answer(plan_teardown(environ))
            case ["next-port"]:
                answer(next_port(environ))
            case ["verdict"]:
                return give_verdict(environ)
            case _:
                say(f"unknown call {argv}")
                return 2
    except HpcDdpError as error:
        say(error.message)
        if error.hint:
            say(f"hint: {error.hint}")
        return error.exit_code
    except OSError as error:
        return vain_start.end_for_disk(argv[0], environ, error)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"a file of the attempt is damaged ({error!r})"
        say(f"{reason}; to go on: {chain.command_to_go_on(environ)}")
        return CAN_GO_ON
    return 0
