"""The only place that runs Slurm's commands and reads what they print.

What is read are the plain text formats: the JSON ones changed shape from version to
version. Arguments are lists, never shell strings.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_ddp.run.errors import HpcDdpError

TIMEOUT_S = 60.0

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
    """Run one of Slurm's commands and return what it printed.

    Raises
    ------
    HpcDdpError
        it is not there, failed, or gave no answer
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
        raise HpcDdpError(f"{argv[0]} refused: {said}", hint=f"see `man {argv[0]}`")
    return done.stdout


def sbatch(script: str, env: Mapping[str, str], *options: str) -> str:
    """Submit a script file and return the job id."""
    printed = _run(["sbatch", "--parsable", *options, script], env=clean_env(env))
    return printed.strip().split(";")[0]


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs in one call; ids that Slurm no longer knows are passed over."""
    try:
        _run(["scancel", *job_ids])
    except HpcDdpError as error:
        if "Invalid job id" not in error.message:
            raise


def requeue(job_id: str) -> None:
    """Put a batch job back into the queue. From inside of it, this also ends the caller."""
    _run(["scontrol", "requeue", job_id])


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
    """What ``scontrol show job`` says of a job; times in unix seconds."""

    state: str
    reason: str
    restarts: int
    preempted: bool
    end_time: float | None


def show_job(job_id: str) -> Job:
    """Ask the controller for a job.

    Raises
    ------
    HpcDdpError
        no such job, or no answer
    """
    return parse_job(_run(["scontrol", "show", "job", job_id]))


def is_pending_or_running(job_id: str) -> bool:
    """Tell whether a job may still do something; False also where nobody can be asked."""
    try:
        return show_job(job_id).state in ("PENDING", "RUNNING", "SUSPENDED")
    except HpcDdpError:
        return False


def parse_job(text: str) -> Job:
    """Read the multi-line format. Fields are anchored at line starts: a job's name, which
    stands on the first line, may hold anything."""

    def value(pattern: str) -> str:
        match = re.search(pattern, text, re.M)
        return match[1] if match else ""

    end = value(r"^\s+StartTime=\S+ EndTime=(\S+)")
    return Job(
        state=value(r"^\s+JobState=(\S+)"),
        reason=value(r"^\s+JobState=\S+ Reason=(\S+)"),
        restarts=int(value(r"^\s+Requeue=\d+ Restarts=(\d+)") or 0),
        preempted=value(r"^\s+PreemptEligibleTime=\S+ PreemptTime=(\S+)") not in ("", "None"),
        end_time=_unix(end),
    )


def _unix(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # Unknown, None
        return None


@dataclass(frozen=True)
class Queued:
    """One line of the queue. `reason` is Slurm's word for why a job waits."""

    state: str
    reason: str
    nodes: str
    time_left: str


def queue() -> dict[str, Queued]:
    """Return my jobs that Slurm still has, by job id, with one call."""
    printed = _run(["squeue", "--me", "--noheader", "--format=%F|%T|%r|%N|%L", "--states=all"])
    rows = (line.split("|") for line in printed.splitlines())
    return {row[0]: Queued(*row[1:]) for row in rows if len(row) == 5}


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
    except NoAnswerError:
        raise
    except HpcDdpError as error:
        forgotten = error
    asked = ["--format=State,Reason,ExitCode,NodeList,Start", f"--jobs={job_id}"]
    printed = _run(["sacct", "--allocations", "--noheader", "--parsable2", *asked])
    rows = [line.split("|") for line in printed.splitlines() if line.count("|") == 4]
    if not rows:
        raise forgotten
    state, reason, code, nodes, start = rows[-1]
    return Record(state.partition(" ")[0], reason, code, nodes, _unix(start))


def parse_record(text: str) -> Record:
    """Read what ``scontrol show job`` prints; of an array, the first job."""

    def value(pattern: str) -> str:
        match = re.search(pattern, text, re.M)
        return match[1] if match else ""

    return Record(
        state=value(r"^\s+JobState=(\S+)"),
        reason=value(r"^\s+JobState=\S+ Reason=(\S+)").replace("_", " "),
        exit_code=value(r"^\s+Requeue=.* ExitCode=(\S+)"),
        nodes=value(r"^\s+NodeList=(\S+)").replace("(null)", ""),
        start_time=_unix(value(r"^\s+StartTime=(\S+)")),
    )
