"""The only place that runs Slurm's commands; `slurm_text` parses what they print.

Arguments are lists, never shell strings. Errors are HpcDdpError: the command is not there, can't be
started, or refuses; and its subclass NoAnswerError: the controller gives no answer.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from hpc_ddp import slurm_text
from hpc_ddp.core.attempt_env import asking_env, submit_env
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.slurm_text import Job, QueuedJob, Record

TIMEOUT_S = 60.0
PATIENCE_S = 120.0  # how long a controller that is being restarted is waited for
LONGEST_PAUSE_S = 30.0
LOOKS = 4  # a submit whose answer was lost came up in the queue seconds after the first look


class NoAnswerError(HpcDdpError):
    """A command of Slurm got no answer; it may have been carried out all the same."""


def options_of(script: Path, more: Sequence[str] = ()) -> dict[str, str]:
    """Return a batch script's options, none where it can't be read, and those of `more` words."""
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
    """Run one of Slurm's commands once and return what it printed; `umask` -1 keeps this process's,
    `env` None is `asking_env`.

    Raise NoAnswerError where the controller gave no answer: what was asked for may have been done
    all the same; and HpcDdpError where the command is not there, can't be started, or refused.
    """
    try:
        done = subprocess.run(
            argv,
            env=env or asking_env(os.environ),
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
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"{argv[0]} gave no answer within {timeout_s:.0f} s", hint="scontrol ping"
        ) from None
    if done.returncode:
        printed = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        reason = slurm_text.parse_reason(argv[0], printed)
        if slurm_text.NO_ANSWER.search(reason):
            raise NoAnswerError(f"{argv[0]} got no answer: {reason}", hint="scontrol ping")
        hint = slurm_text.hint_for(reason) or f"man {argv[0]}"
        raise HpcDdpError(f"{argv[0]} refused: {reason}", hint=hint)
    return done.stdout


def own_cluster() -> str:
    """Return the cluster that Slurm's commands ask here as `JobRef` has it, '' where it does not
    say."""
    try:
        return slurm_text.parse_cluster(show_config())
    except HpcDdpError:
        return ""


def _at(job: str | JobRef) -> list[str]:
    """Return the option that leads a command to a job's cluster; none for an id alone, which is
    this cluster's. Raise HpcDdpError where that can't be asked for its name."""
    name = job.cluster_name if isinstance(job, JobRef) else ""
    if not name or name == show_config().get("ClusterName"):
        return []
    return [f"--clusters={name}"]


def _id(job: str | JobRef) -> str:
    return job.id if isinstance(job, JobRef) else job


def _patiently(argv: Sequence[str], give_up: float | None = None) -> str:
    """Run a command that may be run twice, and repeat it while the controller does not answer.

    `give_up` ends that by ``time.monotonic()``, also a command; None: PATIENCE_S from now. Each
    repetition is reported on stderr. Raise NoAnswerError then, HpcDdpError for another failure.
    """
    give_up, pause_s = _patience(give_up), 1.0
    while True:
        try:
            return _run(argv, timeout_s=min(TIMEOUT_S, max(1.0, give_up - time.monotonic())))
        except NoAnswerError as error:
            if time.monotonic() + pause_s > give_up:
                raise
            say(f"{error.message}; trying again")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _patience(give_up: float | None) -> float:
    """Return the `give_up` of `_patiently` as a time; None is PATIENCE_S from now."""
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
    cluster where sbatch has been sent to one. `env` is passed on without what `submit_env` leaves
    out. A script that names clusters goes to `cluster`, if given.

    A job whose sbatch got no answer may be queued all the same ("Socket timed out", seen on 22.05).
    Then the queue is searched for a job of this very script, and only if there is none it is
    submitted again, until `give_up` by ``time.monotonic()`` (None: PATIENCE_S from now). `earlier`
    are jobs of the script from before. Raise NoAnswerError after that, or where sbatch prints no id
    and no job is in the queue; and HpcDdpError where sbatch refuses.

    Slurm gives the job sbatch's umask: on a node the user's, which `node.entry` has replaced.
    """
    umask = int(env.get("HPC_DDP_UMASK", "-1"), 8)
    settled = options_of(script, options)
    if cluster and "clusters" in settled:
        options = (*options, f"--clusters={cluster}")
    argv = ["sbatch", "--parsable", *options, str(script)]
    env = submit_env(env, settled)
    clusters = settled.get("clusters") or env.get("SBATCH_CLUSTERS") or env.get("SLURM_CLUSTERS")
    search = partial(_find_submitted, script, earlier, options, (clusters or "").split(","))
    give_up = _patience(give_up)
    while True:
        try:
            printed = _run(argv, env=env, umask=umask)
        except NoAnswerError as error:
            say(f"{error.message}; trying again")
            submitted = search(give_up)
            if submitted:
                return submitted
            if time.monotonic() > give_up:
                raise
        else:
            job_id = slurm_text.parse_job_id(printed)
            job = JobRef.parse(job_id) if job_id else None
            job = job or search(give_up)
            if job is None:
                raise NoAnswerError(
                    f"sbatch has accepted the job, and printed no job id: {printed.strip()!r}",
                    hint="squeue --me shows it",
                )
            return job


def _find_submitted(
    script: Path,
    earlier: Collection[JobRef],
    options: Sequence[str],
    clusters: Sequence[str],
    give_up: float,
) -> JobRef | None:
    """Return a job of a script, on one of some clusters ('': this one), that is not among the
    `earlier` ones; None without one.

    Tasks of an array share the script, and each may queue a job of its own just now. It looks
    several times, for seconds. Raise NoAnswerError without an answer until `give_up`, and
    HpcDdpError where squeue refuses.
    """
    task = next((o.removeprefix("--array=") for o in options if o.startswith("--array=")), None)
    columns = f"--format={slurm_text.SEPARATOR.join(('%F', '%K', '%o'))}"
    for cluster in [*clusters] * LOOKS:
        time.sleep(2)
        argv = ["squeue", "--me", "--noheader", columns, "--states=all"]
        argv += [f"--clusters={cluster}"] if cluster else []
        rows = slurm_text.parse_table(_patiently(argv, give_up), 3, slurm_text.SEPARATOR)
        ids = [id for id, of, command in rows if command == str(script) and task in (None, of)]
        new = [id for id in ids if not JobRef(id, cluster).is_among(earlier)]
        if new:
            return JobRef(max(new, key=int), cluster)
    return None


def cancel(jobs: Sequence[str | JobRef]) -> None:
    """Cancel jobs, with one call for each cluster, but for those that Slurm no longer knows.

    Raise HpcDdpError where Slurm refuses, or gives no answer for PATIENCE_S; jobs of further
    clusters then stay.
    """
    jobs_of: dict[str, list[str | JobRef]] = {}
    for job in jobs:
        name = job.cluster_name if isinstance(job, JobRef) else ""
        jobs_of.setdefault(name, []).append(job)
    for group in jobs_of.values():  # each asks once whether its cluster is this one
        try:
            _patiently(["scancel", *_at(group[0]), *map(_id, group)])
        except HpcDdpError as error:
            if "Invalid job id" not in error.message:
                raise


def requeue(job_id: str) -> None:
    """Put a batch job back into the queue. From inside of it, this also ends the caller.

    Raise NoAnswerError where it may have worked all the same (ask before the next try), and
    HpcDdpError where the site or the job does not permit it.
    """
    _run(["scontrol", "requeue", job_id])


def forbid_requeue(job: str | JobRef) -> None:
    """Have Slurm end a job when its batch script does, with any exit code. Raise HpcDdpError where
    Slurm refuses, or gives no answer for PATIENCE_S."""
    _patiently(["scontrol", *_at(job), "update", f"JobId={_id(job)}", "Requeue=0"])


def release(job: JobRef) -> None:
    """Let a job start that the user's ``--hold`` holds; raises as `forbid_requeue`."""
    _patiently(["scontrol", *_at(job), "release", _id(job)])


def update(job_id: str, setting: str) -> None:
    """Change a waiting job, as by ``TimeLimit=60``; raises as `forbid_requeue`."""
    _patiently(["scontrol", "update", f"JobId={job_id}", setting])


def why_refused(script: Path, *options: str) -> str:
    """Return why a script would never start with these options, or why Slurm gave no answer; '' if
    it would. Nothing is submitted."""
    try:
        env = submit_env(os.environ, options_of(script, options))
        _run(["sbatch", "--test-only", *options, str(script)], env=env)
    except HpcDdpError as error:
        return error.message
    return ""


def unusable(nodes: Sequence[str]) -> list[str]:
    """Return those of the nodes that are down, drained, or do not answer the controller; none where
    Slurm gives no answer."""
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
    """Return the names in a host list such as ``node[1-2]``, in order.

    Raise HpcDdpError where it is empty or can't be expanded, also for '': going on would make N
    worlds of one node.
    """
    names = _run(["scontrol", "show", "hostnames", node_list]).split() if node_list else []
    if not names:
        raise HpcDdpError(f"the node list {node_list!r} of this job names no node")
    return names


def show_job(job: str | JobRef, give_up: float | None = None) -> Job:
    """Return a job as the controller has it. Raise HpcDdpError where there is no such job, or no
    answer.

    An answer is waited for until `give_up`, a time of ``time.monotonic()``; None: PATIENCE_S. The
    name of this cluster, which a job with a cluster needs, is asked for once, without waiting.
    """
    argv = ["scontrol", *_at(job), "show", "job", _id(job)]
    return slurm_text.parse_job(_patiently(argv, give_up))


def job_text(job: str | JobRef) -> str:
    """Return what ``scontrol show job`` prints, without waiting for an answer. Raise HpcDdpError
    where there is no such job, or no answer."""
    return _run(["scontrol", *_at(job), "show", "job", _id(job)])


def queue(cluster: str = "") -> dict[str, QueuedJob]:
    """Return the user's jobs that Slurm still knows, by job id, with one call of squeue; of another
    cluster than this one if one is named.

    The id of an array maps to a task of it that is live, while there is one. Raise HpcDdpError
    where Slurm refuses or gives no answer; it is not waited for.
    """
    option = [f"--clusters={cluster}"] if cluster else []
    columns = f"--format={slurm_text.QUEUE_COLUMNS}"
    argv = ["squeue", *option, "--me", "--noheader", columns, "--states=all"]
    return slurm_text.parse_queue(_run(argv))


def record(job: str | JobRef) -> Record:
    """Return what the controller has of a job; after any error of the controller, what the
    accounting has.

    Raise HpcDdpError, the controller's, where neither knows it, or none answers.
    """
    try:
        return slurm_text.parse_record(job_text(job))
    except HpcDdpError as error:
        forgotten = error
    query = ["--format=State,Reason,ExitCode,NodeList,Start", f"--jobs={_id(job)}"]
    try:
        printed = _run(["sacct", *_at(job), "--allocations", "--noheader", "--parsable2", *query])
    except HpcDdpError:  # a site without accounting, say
        raise forgotten from None
    record = slurm_text.parse_accounting(printed)
    if record is None:
        raise forgotten
    return record


# --- what a cluster is like ----------------------------------------------------------------

ACCOUNTING_S = 15.0  # the accounting's answer is not essential


def show_config() -> dict[str, str]:
    """Return slurm.conf's values by name (``scontrol show config``). Raise HpcDdpError where Slurm
    refuses or gives no answer."""
    return slurm_text.parse_config(_run(["scontrol", "show", "config"]))


def restarting_codes() -> set[int]:
    """Return the exit codes of batch scripts that this cluster requeues or holds; none where it
    does not say."""
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


def show_qos() -> list[dict[str, str]]:
    """Return the qualities of service, each with its values by name; [] where there is no
    accounting, or it does not answer."""
    return _accounting(("show", "qos"), ("Name", "GraceTime", "Preempt", "PreemptMode"))


def show_accounts(user: str) -> list[dict[str, str]]:
    """Return a user's accounts, on all clusters of the accounting, each with its values by name; []
    where there is no accounting, or it does not answer."""
    columns = ("Cluster", "DefaultAccount", "Account", "Partition")
    return _accounting(("show", "user", user, "withassoc"), columns)


def takes_option(command: str, option: str) -> bool:
    """Return whether the help of a command of Slurm's has an option: plugins of a site add some.
    False where the command is not there, or fails."""
    try:
        return f"--{option}" in _run([command, "--help"])
    except HpcDdpError:
        return False


def _accounting(words: Sequence[str], wanted: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a query of sacctmgr, with the values of the `wanted` columns by name; []
    without sacctmgr, or an answer within `ACCOUNTING_S`."""
    argv = ["sacctmgr", "--noheader", "--parsable2", *words, f"format={','.join(wanted)}"]
    try:
        printed = _run(argv, timeout_s=ACCOUNTING_S)
    except HpcDdpError:
        return []
    rows = slurm_text.parse_table(printed, len(wanted))
    return [dict(zip(wanted, row, strict=True)) for row in rows]
