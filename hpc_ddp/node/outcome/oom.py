"""Kills by the kernel of this node for want of memory.

A worker that the kernel kills dies of SIGKILL without a word. The kernel counts such kills: by
memory cgroup, by which Slurm holds a job to its ``--mem``, and for the whole machine. Where a site
has Slurm end the whole step then (OOMKillStep, or OverMemoryKill of its accounting), no supervisor
lives to count: Slurm's own lines in the job's output tell of the kill.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from hpc_ddp.core.file_io import read_tail

KILLED = "out of memory: killed by the kernel"

# By the type of the file system, which is the cgroups' version: the file with the counter.
_FILES = {"cgroup": "memory.oom_control", "cgroup2": "memory.events"}

TAIL_BYTES = 64 * 1024
# Lines of srun and of slurmstepd; the batch script's own memory is none of the step's.
_OF_NODE = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: Out Of Memory", re.M)
_STEP = r"(?:StepId=|step )\d+\S*\.\d+"
_OF_STEP = re.compile(
    rf"^slurmstepd\S* .*(?:detected \d+ oom[-_]kill event.* {_STEP}"
    rf"|{_STEP} exceeded (?:virtual )?memory limit)"
    # Of the accounting (OverMemoryKill), which may name no step; but no "at some point", which may
    # have been a full cache.
    r"|^(?:slurmstepd|srun)\S* .*exceeded (?:job|step) memory limit\s*$",
    re.M | re.I,
)


def count_kills(proc: Path = Path("/proc")) -> int:
    """Return how many processes the kernel has killed for want of memory, 0 where it does not
    count. Old kills are in the number: only the difference of two calls tells something.

    The kills are those in the nearest memory cgroup of this process that has a counter, its own or
    one above it, to which a supervisor's workers belong, too. Without any such counter they are
    those of the whole machine, also in other jobs. `proc` is the folder of procfs.
    """
    for path in [*_counters(proc), proc / "vmstat"]:
        match = re.search(r"^oom_kill (\d+)$", _read(path), re.M)
        if match:
            return int(match[1])
    return 0


def name_kills(failures: list[dict[str, Any]], before: int) -> None:
    """Set ``error`` to `KILLED` in each of `failures` whose ``code`` is that of SIGKILL, if the
    kernel has killed a process since the workers started; `before` is what `count_kills` returned
    then."""
    if count_kills() > before:
        for failure in failures:
            if failure["code"] == -signal.SIGKILL:
                failure["error"] = KILLED


def step_records(silent: Sequence[str], output: Path) -> list[dict[str, Any]]:
    """Return one record of a node's end, in a list, if Slurm has ended the step for want of memory,
    by Slurm's lines in the file `output` since the last verdict; else [].

    `silent` are the nodes without a record, at least one. The record is of the first of them that
    Slurm's lines name, else of the first. It is like a supervisor's, with a failure without rank.
    """
    # Each verdict prints such a line: the last part of the output is this attempt's.
    text = re.split(r"^hpc-ddp: attempt \d+: ", read_tail(output, TAIL_BYTES), flags=re.M)[-1]
    nodes = _OF_NODE.findall(text)
    if not (nodes or _OF_STEP.search(text)):
        return []
    node = next((name for name in silent if name in nodes), silent[0])
    failure = {"rank": None, "code": -signal.SIGKILL, "time": time.time(), "error": KILLED}
    return [{"node": node, "code": -signal.SIGKILL, "notice": None, "failures": [failure]}]


def _counters(proc: Path) -> list[Path]:
    """Return the files in which the kernel may count the kills in this process's memory cgroup,
    then in the cgroups above it; the files need not exist. Raise ValueError where a line of
    ``/proc/self/cgroup`` has another form."""
    files = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)  # as 5:memory:/job_7; of version 2 0::/job_7
        if controllers and "memory" not in controllers.split(","):
            continue
        kind = "cgroup" if controllers else "cgroup2"
        for mount in _mounts(proc, kind):
            inside = PurePosixPath(group).relative_to("/")
            # Version 2 has the file only where the controller is switched on.
            files += [mount / at / _FILES[kind] for at in (inside, *inside.parents)]
    return files


def _mounts(proc: Path, kind: str) -> list[Path]:
    """Return where the file system `kind` is mounted by the mounts in `proc`: cgroup2, or cgroup
    with the controller of memory. [] where it is not mounted."""
    # Device, place, type, options, among which version 1 has its controllers.
    rows = [line.split(" ") for line in _read(proc / "self/mounts").splitlines()]
    return [
        Path(row[1])
        for row in rows
        if row[2] == kind and (kind == "cgroup2" or "memory" in row[3].split(","))
    ]


def _read(path: Path) -> str:
    """Return a file's text, '' if it can't be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
