"""The only place that runs Slurm's commands; `slurm_text` parses what they print.

Arguments are lists, never shell strings.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpc_ddp import slurm_text
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.slurm_text import Job, QueuedJob, Record

TIMEOUT_S = 60.0
PATIENCE_S = 120.0  # how long a controller that is being restarted is waited for
LONGEST_PAUSE_S = 30.0
LOOKS = 4  # a submit whose answer was lost came up in the queue seconds after the first look

# What describes an outer job: with it, srun would bind to that one's CPUs. What names the cluster,
# and proves who asks, is the user's, and so are sbatch's own variables (see `submit_env`).
_INHERITED = re.compile(
    r"(SLURM|SLURMD|SRUN|SALLOC|TORCHELASTIC|HPC_DDP)_"
    r"|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT))$"
)
_KEPT = (
    *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"),
    # The user's own, of a shell or a script.
    *("HPC_DDP_RUNS", "HPC_DDP_SITE_FILE", "HPC_DDP_SAVE_EVERY", "HPC_DDP_HANG_AFTER"),
    *("HPC_DDP_PROFILE", "HPC_DDP_BACKEND", "HPC_DDP_DRY_RUN_DEVICES"),
)
# A supervisor sets these for its own node.
_OF_A_NODE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# sbatch's variables whose option has another name (man sbatch, INPUT ENVIRONMENT VARIABLES).
_OPTIONS = {"timelimit": "time", "array-inx": "array", "req-switch": "switches"}
# Options of which a job has one at most, or one that would undo another.
_FAMILIES = (
    {"gpus", "gpus-per-node", "gpus-per-task", "gres"},
    {"mem", "mem-per-node", "mem-per-cpu", "mem-per-gpu"},
    {"requeue", "no-requeue"},
    {"output", "error"},
)
# With these sbatch would submit something else, or not return before the job's end.
_NEVER = {"array", "wait", "jobid", "no-kill"}


class NoAnswerError(HpcDdpError):
    """A command of Slurm got no answer; it may have been carried out all the same."""


def clean_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without variables of an outer Slurm job, torchrun or hpc-ddp run.

    srun's settings of the user's profile (``SLURM_*``) are left out, too; and, inside a node of a
    run, the network interface that its supervisor chose. The variables in `_KEPT` stay.
    """
    of_a_node = _OF_A_NODE if "HPC_DDP_NODE_FOLDER" in environ else ()
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (_INHERITED.match(name) or name in of_a_node)
    }


def submit_env(environ: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an sbatch that is to keep to some `options` of a script, by name.

    sbatch takes SBATCH_PARTITION, say, over the script's ``#SBATCH --partition``. Here a site's or
    a user's profile has its say where the job has none; a value that is passed over is reported on
    stderr.
    """
    env = clean_env(environ)
    for name in [name for name in env if name.startswith("SBATCH_")]:
        option = name.removeprefix("SBATCH_").lower().replace("_", "-")
        option = _OPTIONS.get(option, option)
        family = next((family for family in _FAMILIES if option in family), {option})
        options_of_job = sorted(family & options.keys())
        if options_of_job or option in _NEVER:
            value = env.pop(name)
            if value != options.get(option):
                reason = (
                    f"the job has --{options_of_job[0]}"
                    if options_of_job
                    else "a job of hpc-ddp has its own way"
                )
                say(f"{name}={value} is not used: {reason}")
    return env


def _options_of(script: Path, more: Sequence[str]) -> dict[str, str]:
    """Return the options of a batch script and of sbatch's command line (`more`), with their
    values. A script that can't be read has none."""
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
    """Run one of Slurm's commands once and return what it printed; `umask` -1 keeps this process's.

    Raise NoAnswerError where the controller gave no answer: what was asked for may have been done
    all the same; and HpcDdpError where the command is not there, can't be started, or refused.
    """
    try:
        done = subprocess.run(
            argv,
            env=env or {**os.environ, "SLURM_TIME_FORMAT": "standard"},  # as `parse_job` reads it
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


def _patiently(argv: Sequence[str], give_up: float | None = None) -> str:
    """Run a command that may be run twice, and repeat it while the controller does not answer.

    `give_up` is the end of that by ``time.monotonic()``; None: PATIENCE_S from now. Raises as
    `_run`.
    """
    give_up, pause_s = _patience(give_up), 1.0
    while True:
        try:
            return _run(argv)
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
    earlier: Collection[str] = (),
    give_up: float | None = None,
) -> str:
    """Submit a script file with `options` such as ``--array=0-3``, and return the job id; `give_up`
    as `show_job` has it. `env` is passed on without what `submit_env` leaves out.

    A job whose sbatch got no answer may be queued all the same ("Socket timed out", seen on 22.05).
    Then the queue is searched for a job of this very script, and only if there is none it is
    submitted again. `earlier` are ids of jobs of the script from before. Raises as `_run`.

    Slurm gives the job sbatch's umask: on a node the user's, which `node.entry` has replaced.
    """
    umask = int(env.get("HPC_DDP_UMASK", "-1"), 8)
    argv = ["sbatch", "--parsable", *options, str(script)]
    env = submit_env(env, _options_of(script, options))
    give_up = _patience(give_up)
    while True:
        try:
            printed = _run(argv, env=env, umask=umask)
        except NoAnswerError as error:
            say(f"{error.message}; trying again")
            submitted = _find_submitted(script, earlier, options, give_up)
            if submitted:
                return submitted
            if time.monotonic() > give_up:
                raise
        else:
            job_id = slurm_text.parse_job_id(printed)
            job_id = job_id or _find_submitted(script, earlier, options, give_up)
            if job_id is None:
                raise NoAnswerError(
                    f"sbatch has accepted the job, and printed no job id: {printed.strip()!r}",
                    hint="squeue --me shows it",
                )
            return job_id


def _find_submitted(
    script: Path, earlier: Collection[str], options: Sequence[str], give_up: float
) -> str | None:
    """Return the id of a job of a script that is not among the `earlier` ones; None without one.

    Tasks of an array share the script, and each may queue a job of its own just now. Raises as
    `_run`.
    """
    task = next((o.removeprefix("--array=") for o in options if o.startswith("--array=")), None)
    for _ in range(LOOKS):
        time.sleep(2)
        argv = ["squeue", "--me", "--noheader", "--format=%F|%K|%o", "--states=all"]
        printed = _patiently(argv, give_up)
        of_script = [
            id
            for id, of, command in slurm_text.parse_table(printed, 3)
            if command == str(script) and task in (None, of)
        ]
        new = [id for id in of_script if id not in earlier]
        if new:
            return max(new, key=int)
    return None


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs in one call, but for ids that Slurm no longer knows; raises as `_run`."""
    try:
        _patiently(["scancel", *job_ids])
    except HpcDdpError as error:
        if "Invalid job id" not in error.message:
            raise


def requeue(job_id: str) -> None:
    """Put a batch job back into the queue. From inside of it, this also ends the caller.

    Raise NoAnswerError where it may have worked all the same (ask before the next try), and
    HpcDdpError where the site or the job does not permit it.
    """
    _run(["scontrol", "requeue", job_id])


def forbid_requeue(job_id: str) -> None:
    """Have Slurm end a job when its batch script does, with any exit code; raises as `_run`."""
    _patiently(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])


def exclude(job_id: str, nodes: Sequence[str]) -> None:
    """Keep a waiting job off some nodes; replaces what it was kept off before. Raises as `_run`."""
    _patiently(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"])


def why_refused(script: Path, *options: str) -> str:
    """Return why a script would never start with these options, or why Slurm gave no answer; '' if
    it would."""
    try:
        env = submit_env(os.environ, _options_of(script, options))
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

    Raise HpcDdpError where it is empty or can't be expanded: going on would make N worlds of one
    node.
    """
    names = _run(["scontrol", "show", "hostnames", node_list]).split() if node_list else []
    if not names:
        raise HpcDdpError(f"the node list {node_list!r} of this job names no node")
    return names


def show_job(job_id: str, give_up: float | None = None) -> Job:
    """Ask the controller for a job. Raise HpcDdpError where there is no such job, or no answer.

    An answer is waited for until `give_up`, a time of ``time.monotonic()``; None: PATIENCE_S.
    """
    return slurm_text.parse_job(_patiently(["scontrol", "show", "job", job_id], give_up))


def job_text(job_id: str) -> str:
    """Return what ``scontrol show job`` prints, without waiting for an answer; errors as
    `show_job`."""
    return _run(["scontrol", "show", "job", job_id])


def is_pending_or_running(job_id: str) -> bool:
    """Return whether a job waits, runs or is suspended; False where Slurm gives no answer."""
    try:
        return slurm_text.parse_job(job_text(job_id)).state in ("PENDING", "RUNNING", "SUSPENDED")
    except HpcDdpError:
        return False


def queue() -> dict[str, QueuedJob]:
    """Return the user's jobs that Slurm still knows, by job id, with one call of squeue.

    The id of an array maps to a task of it that is live, while there is one. Raises as `_run`.
    """
    columns = "--format=%F|%A|%T|%r|%N|%L|%Z|%o"
    return slurm_text.parse_queue(_run(["squeue", "--me", "--noheader", columns, "--states=all"]))


def record(job_id: str) -> Record:
    """Ask the controller for a job, and the accounting where the controller has forgotten it.

    Raise HpcDdpError where neither knows it, or none answers.
    """
    try:
        return slurm_text.parse_record(job_text(job_id))
    except HpcDdpError as error:
        forgotten = error
    query = ["--format=State,Reason,ExitCode,NodeList,Start", f"--jobs={job_id}"]
    try:
        printed = _run(["sacct", "--allocations", "--noheader", "--parsable2", *query])
    except HpcDdpError:  # a site without accounting, say
        raise forgotten from None
    record = slurm_text.parse_accounting(printed)
    if record is None:
        raise forgotten
    return record


# --- what a cluster is like ----------------------------------------------------------------

ACCOUNTING_S = 15.0  # the accounting's answer is not essential


def show_config() -> dict[str, str]:
    """Return slurm.conf's values by name (``scontrol show config``); raises as `_run`."""
    return slurm_text.parse_config(_run(["scontrol", "show", "config"]))


def show_all(kind: str) -> list[dict[str, str]]:
    """Return all partitions (`kind` is ``partition``) or nodes (``node``), each with its values by
    name. Raises as `_run`."""
    return slurm_text.parse_records(_run(["scontrol", "--oneliner", "show", kind]))


def show_qos() -> list[dict[str, str]]:
    """Return the qualities of service, each with its values by name; [] where there is no
    accounting, or it does not answer."""
    return _accounting(("show", "qos"), ("Name", "GraceTime", "Preempt", "PreemptMode"))


def show_accounts(user: str) -> list[dict[str, str]]:
    """Return a user's accounts, on all clusters of the accounting, each with its values by name; []
    as `show_qos`."""
    columns = ("Cluster", "DefaultAccount", "Account", "Partition")
    return _accounting(("show", "user", user, "withassoc"), columns)


def takes_option(command: str, option: str) -> bool:
    """Return whether the help of a command of Slurm's has an option: plugins of a site add some.
    False where the command is not there."""
    try:
        return f"--{option}" in _run([command, "--help"])
    except HpcDdpError:
        return False


def _accounting(words: Sequence[str], wanted: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a query of sacctmgr, with the values of the `wanted` columns by name; []
    without an answer."""
    argv = ["sacctmgr", "--noheader", "--parsable2", *words, f"format={','.join(wanted)}"]
    try:
        printed = _run(argv, timeout_s=ACCOUNTING_S)
    except HpcDdpError:
        return []
    rows = slurm_text.parse_table(printed, len(wanted))
    return [dict(zip(wanted, row, strict=True)) for row in rows]
