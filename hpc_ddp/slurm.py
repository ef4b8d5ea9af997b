"""The only place that runs Slurm's commands; `slurm_text` parses what they print.

Arguments are lists, never shell strings. Errors are HpcDdpError: the command is missing, can't be
started, or refuses; or its subclass NoAnswerError: the controller gives no answer.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from hpc_ddp import slurm_text
from hpc_ddp.core.attempt_env import asking_env, submit_env
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.slurm_text import Job, JobRecord, QueuedJob

TIMEOUT_S = 60.0  # of one command
PATIENCE_S = 120.0  # how long a controller that is being restarted is waited for
LONGEST_PAUSE_S = 30.0
SUBMIT_LOOKS, LOOK_PAUSE_S = 4, 2.0  # a submit without an answer came up after the first look


class NoAnswerError(HpcDdpError):
    """A command of Slurm got no answer; what it asked for may be done all the same."""


class UnknownJobError(HpcDdpError):
    """Slurm has no such job, or not any more."""


def options_of(script: Path, more: Sequence[str] = ()) -> dict[str, str]:
    """Return the options of a batch script and of the words `more`, which win: values by long name,
    '' for a flag and for ``--time 10``. A script that can't be read has none."""
    try:
        text = script.read_text(errors="replace")
    except OSError:  # sbatch's own error is better
        text = ""
    return slurm_text.parse_options(text, more)


def _run(
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    umask: int = -1,
) -> str:
    """Run one of Slurm's commands once and return its stdout; `umask` -1 keeps this process's,
    `env` None is `asking_env`. Raise NoAnswerError where the controller gave no answer or the
    command took `timeout_s`; UnknownJobError; and HpcDdpError where the command is missing, can't
    be started, or refused otherwise."""
    try:
        done = subprocess.run(
            argv,
            env=env or asking_env(os.environ),
            stdin=subprocess.DEVNULL,  # a site's wrapper may ask
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            umask=umask,
        )
    except FileNotFoundError:
        raise HpcDdpError(
            f"{argv[0]} was not found: this machine has no Slurm client",
            hint="log in to the cluster first, or try the job here with `hpc-ddp dry-run`",
        ) from None
    except OSError as error:  # thousands of node names are too long for one argument, say
        raise HpcDdpError(f"{argv[0]} can't be started: {error.strerror}") from None
    except subprocess.TimeoutExpired as error:  # sbatch itself tries again where a queue is full
        reason = f"no answer within {timeout_s:.0f} s{slurm_text.last_line(error.stderr)}"
        raise NoAnswerError(f"{argv[0]} gave {reason}", hint="scontrol ping") from None
    has_id = argv[0] == "sbatch" and slurm_text.parse_job_id(done.stdout)  # its wrapper failed
    if done.returncode and not has_id:
        printed = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        reason = slurm_text.parse_reason(argv[0], printed)
        if slurm_text.NO_ANSWER.search(reason):
            raise NoAnswerError(f"{argv[0]} got no answer: {reason}", hint="scontrol ping")
        hint = slurm_text.hint_for(reason) or f"man {argv[0]}"
        kind = UnknownJobError if "Invalid job id" in reason else HpcDdpError
        raise kind(f"{argv[0]} refused: {reason}", hint=hint)
    return done.stdout


def own_cluster() -> str:
    """Ask the controller once, and return this cluster as `JobRef` has it; '' where it has no name,
    or the controller gives no answer."""
    try:
        return slurm_text.parse_cluster(show_config())
    except HpcDdpError:
        return ""


def cluster_option(job: str | JobRef) -> list[str]:
    """Return [``--clusters=NAME``] for a job of another cluster; [] for one of this cluster, and
    for an id alone. Raise HpcDdpError for a job with a cluster if Slurm does not name this one."""
    name = job.cluster_name if isinstance(job, JobRef) else ""
    if not name or name == show_config().get("ClusterName"):
        return []
    return [f"--clusters={name}"]


def _id_of(job: str | JobRef) -> str:
    return job.id if isinstance(job, JobRef) else job


def _run_patiently(argv: Sequence[str], give_up: float | None = None) -> str:
    """Run a command that may be run twice, repeat it while the controller gives no answer, and
    return its stdout. Each repetition is reported on stderr.

    Raise NoAnswerError at `give_up`, a time of ``time.monotonic()`` (None: PATIENCE_S from now),
    which also ends a command that runs then; HpcDdpError for another failure, at once.
    """
    give_up, pause_s = deadline(give_up), 1.0
    while True:
        try:
            return _run(argv, timeout_s=min(TIMEOUT_S, max(1.0, give_up - time.monotonic())))
        except NoAnswerError as error:
            if time.monotonic() + pause_s > give_up:
                raise
            say(f"{error.message}; trying again")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def deadline(give_up: float | None) -> float:
    """Return `give_up`, a time of ``time.monotonic()``; for None PATIENCE_S from now."""
    return time.monotonic() + PATIENCE_S if give_up is None else give_up


def sbatch(
    script: Path,
    env: Mapping[str, str],
    *options: str,
    earlier: Collection[JobRef] = (),
    give_up: float | None = None,
    cluster: str = "",
) -> JobRef:
    """Submit a script file with `options` such as ``--array=0-3``, and return the job, with its
    cluster where sbatch has been sent to one. sbatch gets `env` without what `submit_env` leaves
    out, which is reported on stderr. `cluster` replaces clusters that the script or `options` name,
    and has no effect where neither names one.

    A job whose sbatch got no answer may be queued all the same ("Socket timed out", seen on 22.05).
    So this is reported on stderr, and the queue is searched, for seconds, for a job of this script
    that is not among `earlier`. Without one the script is submitted again, until `give_up` by
    ``time.monotonic()`` (None: PATIENCE_S from now). Raise NoAnswerError after that, where sbatch
    prints no id and no job is found, or where squeue refuses; and HpcDdpError where sbatch refuses.

    Slurm gives the job sbatch's umask: the user's, in HPC_DDP_UMASK where `node.entry` has set one.
    """
    umask = int(env.get("HPC_DDP_UMASK", "-1"), 8)  # -1: this process's
    job_options = options_of(script, options)
    if cluster and "clusters" in job_options:
        options = (*options, f"--clusters={cluster}")
        job_options["clusters"] = cluster
    argv = ["sbatch", "--parsable", *options, str(script)]
    env = submit_env(env, job_options)
    names = job_options.get("clusters") or env.get("SBATCH_CLUSTERS") or env.get("SLURM_CLUSTERS")
    search = partial(_find_submitted, script, earlier, options, (names or "").split(","))
    give_up = deadline(give_up)
    while True:
        try:
            printed = _run(argv, env=env, umask=umask)
        except NoAnswerError as error:
            say(f"{error.message}; trying again")
            if submitted := search(give_up):
                return submitted
            if time.monotonic() > give_up:
                raise
        else:
            job_id = slurm_text.parse_job_id(printed)
            job = (JobRef.parse(job_id) if job_id else None) or search(give_up)
            if job is None:
                text = f"sbatch has accepted the job, and printed no job id: {printed.strip()!r}"
                raise NoAnswerError(text, hint="squeue --me shows it")
            return job


def _find_submitted(
    script: Path,
    earlier: Collection[JobRef],
    options: Sequence[str],
    clusters: Sequence[str],
    give_up: float,
) -> JobRef | None:
    """Return the newest job of a script, on one of `clusters` ('': this one), that is not among the
    `earlier` ones; None where there is none. Where `options` have an ``--array``, the job has the
    same one: all tasks of an array share the script, and each may be queueing a job of its own.

    squeue is asked `SUBMIT_LOOKS` times for each cluster, `LOOK_PAUSE_S` apart. Raise NoAnswerError
    without an answer until `give_up`, or where squeue refuses.
    """
    array = next((o.removeprefix("--array=") for o in options if o.startswith("--array=")), None)
    columns = f"--format={slurm_text.SEPARATOR.join(('%F', '%K', '%o'))}"  # id, array, script
    for cluster in [*clusters] * SUBMIT_LOOKS:
        time.sleep(LOOK_PAUSE_S)
        argv = ["squeue", "--me", "--noheader", columns, "--states=all"]
        if cluster:
            argv.append(f"--clusters={cluster}")
        try:
            table = _run_patiently(argv, give_up)
        except HpcDdpError as error:  # the job may be there all the same
            raise NoAnswerError(error.message, hint="squeue --me, before another start") from None
        rows = slurm_text.parse_table(table, 3, slurm_text.SEPARATOR)
        ids = [id for id, tasks, path in rows if path == str(script) and array in (None, tasks)]
        new = [id for id in ids if not JobRef(id, cluster).is_among(earlier)]
        if new:
            return JobRef(max(new, key=int), cluster)
    return None


def cancel(jobs: Sequence[str | JobRef]) -> None:
    """Cancel jobs, with one call for each cluster. A job that Slurm no longer knows is no error.
    Raise HpcDdpError where Slurm refuses, or gives no answer for PATIENCE_S; jobs of further
    clusters stay."""
    jobs_of: dict[str, list[str | JobRef]] = {}
    for job in jobs:
        name = job.cluster_name if isinstance(job, JobRef) else ""
        jobs_of.setdefault(name, []).append(job)
    for group in jobs_of.values():
        with suppress(UnknownJobError):
            _run_patiently(["scancel", *cluster_option(group[0]), *map(_id_of, group)])


def requeue(job_id: str) -> None:
    """Put a batch job back into the queue. Called from inside the job, this also ends the caller.
    Raise NoAnswerError where the job may be requeued all the same (ask before the next try), and
    HpcDdpError where Slurm refuses, as where the site or the job does not permit it."""
    _run(["scontrol", "requeue", job_id])


def forbid_requeue(job: str | JobRef) -> None:
    """Have Slurm never requeue a job, whatever ends it. Raise HpcDdpError where Slurm refuses, or
    gives no answer for PATIENCE_S."""
    place = cluster_option(job)
    _run_patiently(["scontrol", *place, "update", f"JobId={_id_of(job)}", "Requeue=0"])


def release(job: JobRef, give_up: float | None = None) -> None:
    """Release a job that a ``--hold`` of the user keeps waiting; raises as `_run_patiently`."""
    _run_patiently(["scontrol", *cluster_option(job), "release", _id_of(job)], give_up)


def update_job(job_id: str, *settings: str) -> None:
    """Change `settings` of a job, as ``TimeLimit=60``; raises as `_run_patiently`."""
    _run_patiently(["scontrol", "update", f"JobId={job_id}", *settings])


def why_refused(script: Path, *options: str) -> str:
    """Return why a script would never start with these options, or why Slurm gave no answer; '' if
    it would start. Nothing is submitted or raised; `submit_env` may report on stderr."""
    try:
        env = submit_env(os.environ, options_of(script, options))
        _run(["sbatch", "--test-only", *options, str(script)], env=env)
    except HpcDdpError as error:
        return error.message
    return ""


def unusable_nodes(nodes: Sequence[str]) -> list[str]:
    """Return those of the nodes, in their order, that are down, drained or failing, or do not
    answer the controller; [] as well where Slurm gives no answer."""
    bad = re.compile(r"down|drain|fail|.*\*")  # a star: it does not answer
    if not nodes:
        return []
    argv = ["sinfo", "--noheader", "--Node", "--format=%N|%T"]  # all: names may be too many
    try:
        states = dict(slurm_text.parse_table(_run(argv), 2))
    except HpcDdpError:
        return []
    return [node for node in nodes if bad.match(states.get(node, ""))]


def expand_hosts(node_list: str) -> list[str]:
    """Return the names in a host list such as ``node[1-2]``, in order. Raise HpcDdpError where
    Slurm can't expand it, or it names none: each node would train alone."""
    text = _run_patiently(["scontrol", "show", "hostnames", node_list]) if node_list else ""
    if not (names := slurm_text.host_names(text, node_list)):
        raise HpcDdpError(f"the node list {node_list!r} of this job names no node")
    return names


def show_job(job: str | JobRef, give_up: float | None = None) -> Job:
    """Return a job as the controller has it. Raise as `job_text` with the `deadline` `give_up`."""
    return slurm_text.parse_job(job_text(job, deadline(give_up)))


def job_text(job: str | JobRef, give_up: float | None = None) -> str:
    """Return what ``scontrol show job`` prints, asked until `give_up`, by ``time.monotonic()``;
    None: asked once. Raise HpcDdpError where there is no such job, or no answer (NoAnswerError)."""
    argv = ["scontrol", *cluster_option(job), "show", "job", _id_of(job)]
    return _run(argv) if give_up is None else _run_patiently(argv, give_up)


def list_jobs(cluster: str = "", is_patient: bool = False) -> dict[str, QueuedJob]:
    """Return the user's jobs that Slurm still knows, by job id, asked for all at once; `cluster`
    is a name, '' for this one.

    The id of an array maps to a task of it that is live, while there is one. Raise HpcDdpError
    where Slurm refuses or gives no answer, with `is_patient` for PATIENCE_S.
    """
    option = [f"--clusters={cluster}"] if cluster else []
    columns = f"--format={slurm_text.QUEUE_COLUMNS}"
    argv = ["squeue", *option, "--me", "--noheader", columns, "--states=all"]
    return slurm_text.parse_queue(_run_patiently(argv) if is_patient else _run(argv))


def find_record(job: str | JobRef) -> JobRecord:
    """Return what the controller has of a job; where it fails in any way, what the accounting has.
    Each is asked once. Raise the controller's HpcDdpError where the accounting does not know the
    job, or fails."""
    try:
        return slurm_text.parse_record(job_text(job))
    except HpcDdpError as error:
        controller_error = error
    try:
        printed = _accounting_of(job, "State,Reason,ExitCode,NodeList,Start")
    except HpcDdpError:  # a site without accounting, say
        raise controller_error from None
    if record := slurm_text.parse_accounting(printed):
        return record
    raise controller_error


def starts_in_accounting(job_id: str) -> list[str]:
    """Return the states of all starts of a job, oldest first; [] without an answer."""
    try:  # by an array's id, which its last task has as well, sacct prints all its tasks
        printed = _accounting_of(job_id, "JobIDRaw,State", "--duplicates")
    except HpcDdpError:
        return []
    return [state for row_id, state in slurm_text.parse_table(printed, 2) if row_id == job_id]


def _accounting_of(job: str | JobRef, columns: str, *options: str) -> str:
    """Return what sacct prints of a job; raise HpcDdpError where it fails or gives no answer."""
    style = ["--allocations", "--noheader", "--parsable2", f"--format={columns}", *options]
    return _run(["sacct", *cluster_option(job), *style, f"--jobs={_id_of(job)}"])


# --- what a cluster is like ----------------------------------------------------------------

ACCOUNTING_S = 15.0  # the answer is not essential
COLUMNS_OF_QOS = "Name,GraceTime,Preempt,PreemptMode"
COLUMNS_OF_USER = "Cluster,DefaultAccount,Account,Partition"


@cache  # a sweep has a thousand jobs
def show_config() -> dict[str, str]:
    """Return slurm.conf's values by name. Raise HpcDdpError where Slurm refuses or is silent."""
    return slurm_text.parse_config(_run(["scontrol", "show", "config"]))


def restarting_codes() -> set[int]:
    """Return the exit codes of a batch script for which this cluster requeues or holds its job; an
    empty set where Slurm gives no answer."""
    try:
        config = show_config()
    except HpcDdpError:
        return set()
    lists = (config.get("RequeueExit", ""), config.get("RequeueExitHold", ""))
    return {code for text in lists for code in slurm_text.parse_codes(text)}


def show_all(kind: str) -> list[dict[str, str]]:
    """Return all partitions (`kind` is ``partition``) or nodes (``node``), each with its values by
    name. Raise HpcDdpError where Slurm refuses or gives no answer."""
    return slurm_text.parse_records(_run(["scontrol", "--oneliner", "show", kind]))


def show_accounting(kind: str, *words: str) -> list[dict[str, str]]:
    """Return all qualities of service (`kind` is ``qos``), or a user's accounts (``user``), on all
    clusters of the accounting, each with its values by name (`COLUMNS_OF_QOS`, `COLUMNS_OF_USER`);
    [] without an answer. `words` are further ones of sacctmgr's query."""
    columns = COLUMNS_OF_QOS if kind == "qos" else COLUMNS_OF_USER
    query = ["show", kind, *words, f"format={columns}"]
    try:
        printed = _run(["sacctmgr", "--noheader", "--parsable2", *query], timeout_s=ACCOUNTING_S)
    except HpcDdpError:
        return []
    rows = slurm_text.parse_table(printed, columns.count(",") + 1)
    return [dict(zip(columns.split(","), row, strict=True)) for row in rows]


def takes_option(command: str, option: str) -> bool:
    """Return whether the help of one of Slurm's commands names an option, given without its dashes:
    a site's plugin may add some. False where the command is missing, or fails."""
    try:
        return f"--{option}" in _run([command, "--help"])
    except HpcDdpError:
        return False
