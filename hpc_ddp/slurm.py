"""The only place that runs Slurm's commands and reads what they print.

What is read are the plain text formats: the JSON ones changed shape from version to
version. Arguments are lists, never shell strings.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpc_ddp.run.errors import HpcDdpError

TIMEOUT_S = 60.0
PATIENCE_S = 120.0  # how long a controller that is being restarted is waited for
LOOKS = 4  # a submit whose answer was lost came up in the queue seconds after the first look

# What the commands say when the controller has not answered; another try may do better.
_NO_ANSWER = re.compile(
    r"Socket timed out|Unable to contact slurm controller|Zero Bytes were transmitted"
    r"|backup controller in standby|temporarily unable to accept|Connection (refused|reset)",
    re.I,
)

# What an inherited variable of an outer job does: sbatch takes its value over that of the
# script, and srun binds to CPUs of the outer job. SLURM_CONF says which cluster it is.
_INHERITED = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC)_")
_KEPT = ("SLURM_CONF",)


class NoAnswerError(HpcDdpError):
    """A command of Slurm was sent, and nobody knows what became of it."""


def clean_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what an outer job or a shell profile left there for Slurm."""
    return {k: v for k, v in environ.items() if k in _KEPT or not _INHERITED.match(k)}


def _run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
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
            argv, env=env, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except FileNotFoundError:
        raise HpcDdpError(
            f"{argv[0]} was not found: this machine has no Slurm client",
            hint="log in to the cluster first, or try the job here with `hpc-ddp dry-run`",
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"{argv[0]} gave no answer within {TIMEOUT_S:.0f} s", hint="scontrol ping"
        ) from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        said = re.sub(rf"^{argv[0]}: (error: )?", "", said, flags=re.M).replace("\n", "; ")
        if _NO_ANSWER.search(said):
            raise NoAnswerError(f"{argv[0]} got no answer: {said}", hint="scontrol ping")
        hint = next((hint for word, hint in _HINTS.items() if word in said), f"man {argv[0]}")
        raise HpcDdpError(f"{argv[0]} refused: {said}", hint=hint)
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
    print(f"hpc-ddp: {error.message}; trying again", file=sys.stderr, flush=True)


def sbatch(script: Path, env: Mapping[str, str], *options: str, known: Collection[str] = ()) -> str:
    """Submit a script file and return the job id.

    Without an answer nobody knows whether the job is queued ("Socket timed out", and it ran all
    the same: seen on 22.05). Then the queue is asked for a job of this very script, and only if
    there is none it is submitted again. `known` are ids of jobs of the script from before.
    """
    argv = ["sbatch", "--parsable", *options, str(script)]
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _run(argv, env=clean_env(env)).strip().split(";")[0]
        except NoAnswerError as error:
            _say_again(error)
            found = _find_submitted(script, known, options)
            if found:
                return found
            if time.monotonic() > give_up:
                raise


def _find_submitted(script: Path, known: Collection[str], options: Sequence[str]) -> str | None:
    """Return the id of a job of a script that is not among the `known` ones, if there is one.

    Tasks of an array share the script, and each may queue a job of its own just now.
    """
    task = next((o.removeprefix("--array=") for o in options if o.startswith("--array=")), None)
    for _ in range(LOOKS):
        time.sleep(2)
        printed = _patiently(["squeue", "--me", "--noheader", "--format=%F|%K|%o", "--states=all"])
        rows = (line.split("|", 2) for line in printed.splitlines() if line.count("|") >= 2)
        mine = [id for id, of, command in rows if command == str(script) and task in (None, of)]
        found = [id for id in mine if id not in known]
        if found:
            return max(found, key=int)
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


def exclude(job_id: str, nodes: Sequence[str]) -> None:
    """Keep a waiting job off some nodes; replaces what it was kept off before."""
    _patiently(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"])


def could_run(script: Path, *options: str) -> bool:
    """Tell whether a script could ever start with these options; False without an answer."""
    try:
        _run(["sbatch", "--test-only", *options, str(script)], env=clean_env(os.environ))
    except HpcDdpError:
        return False
    return True


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


@dataclass(frozen=True)
class Job:
    """What ``scontrol show job`` says of a job; times in unix seconds.

    `preempted_at` is when a preemption began, or, without a grace time or after it, when it
    ended the job.
    """

    state: str
    reason: str
    restarts: int
    preempted_at: float | None
    end_time: float | None

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


def is_pending_or_running(job_id: str) -> bool:
    """Tell whether a job may still do something; False also where nobody can be asked."""
    try:
        job = parse_job(_run(["scontrol", "show", "job", job_id]))
        return job.state in ("PENDING", "RUNNING", "SUSPENDED")
    except HpcDdpError:
        return False


def parse_job(text: str) -> Job:
    """Read the multi-line format. Fields are anchored at line starts: a job's name, which
    stands on the first line, may hold anything."""

    value = partial(_field, text)
    end = value(r"^\s+StartTime=\S+ EndTime=(\S+)")
    return Job(
        state=value(r"^\s+JobState=(\S+)"),
        reason=value(r"^\s+JobState=\S+ Reason=(\S+)"),
        restarts=int(value(r"^\s+Requeue=\d+ Restarts=(\d+)") or 0),
        preempted_at=_unix(value(r"^\s+PreemptEligibleTime=\S+ PreemptTime=(\S+)")),
        end_time=_unix(end),
    )


def _field(text: str, pattern: str) -> str:
    """Return the first group of what a pattern finds in ``scontrol show``'s lines, or ''."""
    match = re.search(pattern, text, re.M)
    return match[1] if match else ""


def _unix(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # Unknown, None
        return None


LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING")


@dataclass(frozen=True)
class Queued:
    """One line of the queue. `reason` is Slurm's word for why a job waits."""

    state: str
    reason: str
    nodes: str
    time_left: str


def queue() -> dict[str, Queued]:
    """Return my jobs that Slurm still has, by job id, with one call.

    A task of an array has an id of its own (all but the last have another than the array's). The
    array's is that of the tasks that have not begun, then of the last one to begin; once that is
    over, it stands here for any other task that is not.
    """
    printed = _run(["squeue", "--me", "--noheader", "--format=%F|%A|%T|%r|%N|%L", "--states=all"])
    rows = [row for row in (line.split("|") for line in printed.splitlines()) if len(row) == 6]
    own = {row[1]: Queued(*row[2:]) for row in rows}
    live = {row[0]: Queued(*row[2:]) for row in rows if row[2] in LIVE}
    return own | {
        job: each for job, each in live.items() if job not in own or own[job].state not in LIVE
    }


# States that nothing comes after. PREEMPTED is none of them: a requeue may follow.
OVER = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED"),
)


def queued_scripts() -> set[str]:
    """Return the scripts of those of my jobs that are not over, whoever has submitted them."""
    printed = _run(["squeue", "--me", "--noheader", "--format=%T|%o", "--states=all"])
    rows = (line.partition("|") for line in printed.splitlines())
    return {script for state, _, script in rows if state not in OVER}


@dataclass(frozen=True)
class Record:
    """What is left of a job in Slurm's memory, in Slurm's words.

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
    asked = ["--format=State,Reason,ExitCode,NodeList,Start", f"--jobs={job_id}"]
    try:
        printed = _run(["sacct", "--allocations", "--noheader", "--parsable2", *asked])
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
        state=value(r"^\s+JobState=(\S+)"),
        reason=value(r"^\s+JobState=\S+ Reason=(\S+)").replace("_", " "),
        exit_code=value(r"^\s+Requeue=.* ExitCode=(\S+)"),
        nodes=value(r"^\s+NodeList=(\S+)").replace("(null)", ""),
        start_time=_unix(value(r"^\s+StartTime=(\S+)")),
    )
