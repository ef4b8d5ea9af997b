"""The only place that runs Slurm's commands and reads what they print.

What is read are the plain text formats: the JSON ones changed shape from version to
version. Arguments are lists, never shell strings.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError

TIMEOUT_S = 60.0
PATIENCE_S = 120.0  # how long a controller that is being restarted is waited for
LOOKS = 4  # a submit whose answer was lost came up in the queue seconds after the first look

# What the commands say when the controller has not answered; another try may do better.
_NO_ANSWER = re.compile(
    r"Socket timed out|Unable to contact slurm controller|Zero Bytes were transmitted"
    r"|backup controller in standby|temporarily unable to accept|Connection (refused|reset)",
    re.I,
)

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
_NEVER = {"array", "wait", "jobid"}
_JOB_ID = re.compile(r"\d+(;\S+)?")


class NoAnswerError(HpcDdpError):
    """A command of Slurm was sent, and nobody knows what became of it."""


def clean_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what an outer job, or a run of hpc-ddp in it, left there, and a
    shell profile for srun."""
    of_a_node = _OF_A_NODE if "HPC_DDP_NODE_FOLDER" in environ else ()
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (_INHERITED.match(name) or name in of_a_node)
    }


def submit_env(environ: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an sbatch that is to keep to some options of a script.

    sbatch takes SBATCH_PARTITION, say, over the script's ``#SBATCH --partition``. Here a site's or
    a user's profile has its say where the job has none; a value that is passed over is reported.
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


def _text_of(script: Path) -> str:
    try:
        return script.read_text(errors="replace")
    except OSError:  # sbatch will tell
        return ""


def _options_of(script: str, more: Sequence[str] = ()) -> dict[str, str]:
    """Return the options of a batch script's header, and of a command line, with their values."""
    header = re.findall(r"^#SBATCH +(--\S+)", script, flags=re.M)
    words = (word.removeprefix("--").partition("=") for word in (*header, *more))
    return {name: value for name, _, value in words}


def _run(
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Run one of Slurm's commands once and return what it printed.

    Raises
    ------
    NoAnswerError
        the controller gave no answer: what was asked for may have been done all the same
    HpcDdpError
        it is not there, or refused
    """
    try:
        done = subprocess.run(
            argv,
            env=env or {**os.environ, "SLURM_TIME_FORMAT": "standard"},  # read by `_unix`
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except FileNotFoundError:
        raise HpcDdpError(
            f"{argv[0]} was not found: this machine has no Slurm client",
            hint="log in to the cluster first, or try the job here with `hpc-ddp dry-run`",
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"{argv[0]} gave no answer within {timeout_s:.0f} s", hint="scontrol ping"
        ) from None
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        reason = re.sub(rf"^{argv[0]}: (error: )?", "", reason, flags=re.M).replace("\n", "; ")
        if _NO_ANSWER.search(reason):
            raise NoAnswerError(f"{argv[0]} got no answer: {reason}", hint="scontrol ping")
        hint = next((hint for word, hint in _HINTS.items() if word in reason), f"man {argv[0]}")
        raise HpcDdpError(f"{argv[0]} refused: {reason}", hint=hint)
    return done.stdout


# What to look at, by what Slurm says of a job that it refuses.
_HINTS = {
    "Invalid job array": "fewer tasks: scontrol show config | grep MaxArraySize",
    "Pathname of a file": "fewer tasks: scontrol show config | grep MaxArraySize",
    "nvalid partition": "sinfo -s shows the partitions",
    "node configuration": "sinfo -o '%P %D %c %m %G' shows nodes, CPUs, MB and GPUs by partition",
    "nvalid account": "sacctmgr show associations user=$USER shows your accounts and partitions",
    "nvalid qos": "sacctmgr show associations user=$USER format=account,partition,qos shows yours",
    "nvalid feature": "sinfo -o '%P %f' shows the features that --constraint takes",
    "nvalid node name": "sinfo -N shows the nodes",
    "time limit": "sinfo -o '%P %l' shows the longest --time of each partition",
    "partition not available": "sinfo -o '%P %a' shows which partitions are up",
    "eservation": "scontrol show reservation shows them",
}


def _patiently(argv: Sequence[str]) -> str:
    """Run a command that may be run twice, again and again while nobody answers."""
    give_up, pause_s = time.monotonic() + PATIENCE_S, 1.0
    while True:
        try:
            return _run(argv)
        except NoAnswerError as error:
            if time.monotonic() + pause_s > give_up:
                raise
            _say_again(error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 15.0)


def _say_again(error: HpcDdpError) -> None:
    say(f"{error.message}; trying again")


def sbatch(
    script: Path, env: Mapping[str, str], *options: str, earlier: Collection[str] = ()
) -> str:
    """Submit a script file and return the job id.

    Without an answer nobody knows whether the job is queued ("Socket timed out", and it ran all
    the same: seen on 22.05). Then the queue is asked for a job of this very script, and only if
    there is none it is submitted again. `earlier` are ids of jobs of the script from before.
    """
    argv = ["sbatch", "--parsable", *options, str(script)]
    env = submit_env(env, _options_of(_text_of(script), options))
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            printed = _run(argv, env=env)
        except NoAnswerError as error:
            _say_again(error)
            submitted = _find_submitted(script, earlier, options)
            if submitted:
                return submitted
            if time.monotonic() > give_up:
                raise
        else:
            job_id = parse_job_id(printed) or _find_submitted(script, earlier, options)
            if job_id is None:
                raise NoAnswerError(
                    f"sbatch has accepted the job, and printed no job id: {printed.strip()!r}",
                    hint="squeue --me shows it",
                )
            return job_id


def parse_job_id(printed: str) -> str | None:
    """Return the job id of what ``sbatch --parsable`` printed: some sites' print a banner, too."""
    lines = [line.strip() for line in printed.splitlines()]
    ids = [line.partition(";")[0] for line in lines if _JOB_ID.fullmatch(line)]
    return ids[-1] if ids else None


def _find_submitted(script: Path, earlier: Collection[str], options: Sequence[str]) -> str | None:
    """Return the id of a job of a script that is not among the `earlier` ones, if there is one.

    Tasks of an array share the script, and each may queue a job of its own just now.
    """
    task = next((o.removeprefix("--array=") for o in options if o.startswith("--array=")), None)
    for _ in range(LOOKS):
        time.sleep(2)
        printed = _patiently(["squeue", "--me", "--noheader", "--format=%F|%K|%o", "--states=all"])
        rows = (line.split("|", 2) for line in printed.splitlines() if line.count("|") >= 2)
        of_script = [
            id for id, of, command in rows if command == str(script) and task in (None, of)
        ]
        new = [id for id in of_script if id not in earlier]
        if new:
            return max(new, key=int)
    return None


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs in one call; ids that Slurm no longer knows are passed over."""
    try:
        _patiently(["scancel", *job_ids])
    except HpcDdpError as error:
        if "Invalid job id" not in error.message:
            raise


def requeue(job_id: str) -> None:
    """Put a batch job back into the queue. From inside of it, this also ends the caller.

    Raises
    ------
    NoAnswerError
        it may have worked all the same: ask before the next try
    HpcDdpError
        the site or the job does not permit it
    """
    _run(["scontrol", "requeue", job_id])


def forbid_requeue(job_id: str) -> None:
    """Have Slurm end a job when its batch script does, whatever the exit code."""
    _patiently(["scontrol", "update", f"JobId={job_id}", "Requeue=0"])


def exclude(job_id: str, nodes: Sequence[str]) -> None:
    """Keep a waiting job off some nodes; replaces what it was kept off before."""
    _patiently(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"])


def why_refused(script: Path, *options: str) -> str:
    """Return why a script would never start with these options, or why Slurm gave no answer; ''
    if it would."""
    try:
        env = submit_env(os.environ, _options_of(_text_of(script), options))
        _run(["sbatch", "--test-only", *options, str(script)], env=env)
    except HpcDdpError as error:
        return error.message
    return ""


def unusable(nodes: Sequence[str]) -> list[str]:
    """Return those of the nodes that are down, drained, or do not answer the controller."""
    bad = re.compile(r"down|drain|fail|.*\*")  # a star: it does not answer
    if not nodes:
        return []
    try:
        argv = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T"]
        printed = _run(argv)
    except HpcDdpError:
        return []
    states = dict(line.split("|", 1) for line in printed.splitlines() if "|" in line)
    return [node for node in nodes if bad.match(states.get(node, ""))]


def expand_hosts(node_list: str) -> list[str]:
    """Return the names in a host list such as ``node[1-2]``, in order.

    Raises
    ------
    HpcDdpError
        the list is empty or can't be expanded: going on would make N worlds of one node
    """
    names = _run(["scontrol", "show", "hostnames", node_list]).split() if node_list else []
    if not names:
        raise HpcDdpError(f"the node list {node_list!r} of this job names no node")
    return names


# Slurm shows a flag in the place of the state that it belongs to. A job that is being signalled,
# as at a preemption, is SIGNALING until all of its nodes have answered: seconds, where one is slow.
_STATE_OF = {
    **dict.fromkeys(("SIGNALING", "STOPPED", "RESIZING"), "RUNNING"),
    **dict.fromkeys(("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "EXPEDITING"), "PENDING"),
}


def _state(shown: str) -> str:
    return _STATE_OF.get(shown, shown)


@dataclass(frozen=True)
class Job:
    """A job as ``scontrol show job`` prints it; times in unix seconds.

    `left_s` is how long the job may still run, inf without a limit, None where Slurm does not say.
    Unlike `end_time`, which the controller prints by its own clock and in local time, it holds on
    a host whose clock is off, and in the hour that comes twice a year.

    `preempted_at` is when a preemption began, or, without a grace time or after it, when it
    ended the job. `expedited` is one of Slurm 25.11 and later with ``--requeue=expedite``: if its
    batch script ends with a code other than 0, Slurm holds it in the queue as REQUEUE_HOLD.
    """

    state: str
    reason: str
    restarts: int
    preempted_at: float | None
    end_time: float | None
    left_s: float | None = None
    expedited: bool = False

    @property
    def preempted(self) -> bool:
        """A preemption has begun, and the job runs in its grace time or was ended by it.

        Not a job that was cancelled within its grace time: that ended after the preemption
        began. Where PreemptMode is REQUEUE, one that was ended has a higher restart count.
        """
        if self.preempted_at is None:
            return False
        return self.state == "RUNNING" or (self.end_time or 0) <= self.preempted_at


def show_job(job_id: str) -> Job:
    """Ask the controller for a job.

    Raises
    ------
    HpcDdpError
        no such job, or no answer
    """
    return parse_job(_patiently(["scontrol", "show", "job", job_id]))


def job_text(job_id: str) -> str:
    """Return what ``scontrol show job`` prints; errors as `show_job` has them."""
    return _run(["scontrol", "show", "job", job_id])


def is_pending_or_running(job_id: str) -> bool:
    """Tell whether a job may still do something; False also where nobody can be asked."""
    try:
        job = parse_job(job_text(job_id))
        return job.state in ("PENDING", "RUNNING", "SUSPENDED")
    except HpcDdpError:
        return False


def parse_job(text: str) -> Job:
    """Read the multi-line format. Fields are anchored at line starts: a job's name, which
    stands on the first line, may hold anything."""

    value = partial(_field, text)
    end = value(r"^\s+StartTime=\S+ EndTime=(\S+)")
    return Job(
        state=_state(value(r"^\s+JobState=(\S+)")),
        reason=value(r"^\s+JobState=\S+ Reason=(\S+)"),
        restarts=int(value(r"^\s+Requeue=\S+ Restarts=(\d+)") or 0),
        preempted_at=_unix(value(r"^\s+PreemptEligibleTime=\S+ PreemptTime=(\S+)")),
        end_time=_unix(end),
        left_s=_left_s(value(r"^\s+RunTime=(\S+)"), value(r"^\s+RunTime=\S+ TimeLimit=(\S+)")),
        expedited=value(r"^\s+ExpeditedRequeue=(\S+)") == "Yes",
    )


def _field(text: str, pattern: str) -> str:
    """Return the first group of what a pattern finds in ``scontrol show``'s lines, or ''."""
    match = re.search(pattern, text, re.M)
    return match[1] if match else ""


def _seconds(text: str) -> int | None:
    """Return the seconds of ``1-12:00:00``; None for UNLIMITED, NONE."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _left_s(run_time: str, limit: str) -> float | None:
    elapsed_s, limit_s = _seconds(run_time), _seconds(limit)
    if limit == "UNLIMITED":
        return math.inf
    return None if elapsed_s is None or limit_s is None else float(limit_s - elapsed_s)


def _unix(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # Unknown, None
        return None


LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING")


@dataclass(frozen=True)
class QueuedJob:
    """A line of the queue.

    Attributes
    ----------
    reason
        Slurm's word for why it waits
    script
        a real path; ``(null)`` for one that came through a pipe
    """

    state: str
    reason: str
    nodes: str
    time_left: str
    script: str = ""


def queue() -> dict[str, QueuedJob]:
    """Return the user's jobs that Slurm still knows, by job id, with one call of squeue.

    %A is a task's own id, %F its array's. Pending tasks, and the one that starts last, have the
    array's id. When that one has ended, the array would look finished while others still run; so
    the array's id then maps to a task that is live.
    """
    columns = "--format=%F|%A|%T|%r|%N|%L|%Z|%o"
    printed = _run(["squeue", "--me", "--noheader", columns, "--states=all"])
    jobs: dict[str, QueuedJob] = {}
    live_tasks: dict[str, QueuedJob] = {}
    for fields in (line.split("|", 7) for line in printed.splitlines()):
        if len(fields) != 8:
            continue
        array_id, job_id, state, reason, nodes, time_left, folder, script = fields
        if script != "(null)":
            script = os.path.realpath(os.path.join(folder, script))
        jobs[job_id] = job = QueuedJob(_state(state), reason, nodes, time_left, script)
        if job.state in LIVE:
            live_tasks[array_id] = job
    for array_id, job in live_tasks.items():
        if array_id not in jobs or jobs[array_id].state not in LIVE:
            jobs[array_id] = job
    return jobs


# States that nothing comes after. PREEMPTED is none of them: a requeue may follow.
OVER = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED"),
)


@dataclass(frozen=True)
class Record:
    """A job as Slurm still remembers it, in Slurm's words.

    `exit_code` is ``code:signal``; `start_time` is in unix seconds, of a waiting job a guess.
    """

    state: str
    reason: str
    exit_code: str
    nodes: str
    start_time: float | None


def record(job_id: str) -> Record:
    """Ask the controller for a job, and the accounting where the controller has forgotten it.

    Raises
    ------
    HpcDdpError
        neither knows it, or none answers
    """
    try:
        return parse_record(_run(["scontrol", "show", "job", job_id]))
    except HpcDdpError as error:
        forgotten = error
    query = ["--format=State,Reason,ExitCode,NodeList,Start", f"--jobs={job_id}"]
    try:
        printed = _run(["sacct", "--allocations", "--noheader", "--parsable2", *query])
    except HpcDdpError:  # a site without accounting, say
        raise forgotten from None
    rows = [line.split("|") for line in printed.splitlines() if line.count("|") == 4]
    if not rows:
        raise forgotten
    state, reason, code, nodes, start = rows[-1]
    return Record(state.partition(" ")[0], reason, code, nodes, _unix(start))


def parse_record(text: str) -> Record:
    """Read what ``scontrol show job`` prints; of an array, the first job."""

    value = partial(_field, text)
    return Record(
        state=_state(value(r"^\s+JobState=(\S+)")),
        reason=value(r"^\s+JobState=\S+ Reason=(\S+)").replace("_", " "),
        exit_code=value(r"^\s+Requeue=.* ExitCode=(\S+)"),
        nodes=value(r"^\s+NodeList=(\S+)").replace("(null)", ""),
        start_time=_unix(value(r"^\s+StartTime=(\S+)")),
    )


# --- what a cluster is like ----------------------------------------------------------------

ACCOUNTING_S = 15.0  # nobody waits longer for what is only good to know
_PAIR = re.compile(r"(?:^|\s)([A-Z]\w*)=(\S*)")


def show_config() -> dict[str, str]:
    """Return slurm.conf's values by name, as ``scontrol show config`` prints them.

    Raises
    ------
    HpcDdpError
        there is no Slurm here, or no answer
    """
    return parse_config(_run(["scontrol", "show", "config"]))


def show_all(kind: str) -> list[dict[str, str]]:
    """Return all partitions (`kind` is ``partition``) or nodes (``node``), each with its values."""
    return parse_records(_run(["scontrol", "--oneliner", "show", kind]))


def show_qos() -> list[dict[str, str]]:
    """Return the qualities of service; [] where there is no accounting, or it does not answer."""
    return _accounting(("show", "qos"), ("Name", "GraceTime", "Preempt", "PreemptMode"))


def show_accounts(user: str) -> list[dict[str, str]]:
    """Return a user's accounts, on all clusters of the accounting; [] as `show_qos`."""
    wanted = ("Cluster", "DefaultAccount", "Account", "Partition")
    return _accounting(("show", "user", user, "withassoc"), wanted)


def takes_option(command: str, option: str) -> bool:
    """Tell whether the help of a command of Slurm's has an option: plugins of a site add some."""
    try:
        return f"--{option}" in _run([command, "--help"])
    except HpcDdpError:
        return False


def parse_config(text: str) -> dict[str, str]:
    """Read lines of the form ``Name   = value``; a name that comes again is another section's."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            values.setdefault(name.strip(), value.strip())
    return values


def parse_records(text: str) -> list[dict[str, str]]:
    """Read ``scontrol --oneliner``: by name, never by place, since versions differ in both.

    Of a value with blanks, such as a reason's, the first word is kept; what looks like a name
    within it does not replace one that stands before.
    """
    rows = []
    for line in text.splitlines():
        row: dict[str, str] = {}
        for name, value in _PAIR.findall(line):
            row.setdefault(name, value)
        rows += [row] if row else []
    return rows


def _accounting(words: Sequence[str], wanted: Sequence[str]) -> list[dict[str, str]]:
    argv = ["sacctmgr", "--noheader", "--parsable2", *words, f"format={','.join(wanted)}"]
    try:
        printed = _run(argv, timeout_s=ACCOUNTING_S)
    except HpcDdpError:
        return []
    rows = [line.split("|") for line in printed.splitlines()]
    return [dict(zip(wanted, row, strict=True)) for row in rows if len(row) == len(wanted)]
