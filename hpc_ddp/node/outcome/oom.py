"""Whether the kernel has killed a process of this node for want of memory.

A worker that it kills dies of SIGKILL without a word. The kernel counts such kills: by memory
cgroup, which is what a job's ``--mem`` is held with, and for the whole machine. Where a site has
Slurm end the whole step then (OOMKillStep), no supervisor lives to count: Slurm's own lines in the
job's output tell it.
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

# Type of the file system: the file with the counter. What `mount` shows of version 1 names its
# controllers among the options.
_FILES = {"cgroup": "memory.oom_control", "cgroup2": "memory.events"}

TAIL_BYTES = 64 * 1024
# Lines of srun and of slurmstepd; the batch script's own memory is none of the step's.
_OF_NODE = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: Out Of Memory", re.M)
_OF_STEP = re.compile(
    r"^slurmstepd\S* .*[Dd]etected \d+ oom[-_]kill event.* StepId=\d+\S*\.\d", re.M
)


def kills(proc: Path = Path("/proc")) -> int:
    """Return how many processes the kernel has killed for want of memory, 0 where it does not
    count. Only the difference of two calls tells something.

    The kills are those in this process's memory cgroup, in which a supervisor's workers are, too;
    without such a counter those of the whole machine, also in other jobs. `proc` is where procfs is
    mounted.
    """
    for path in [*_counters(proc), proc / "vmstat"]:
        match = re.search(r"^oom_kill (\d+)$", _read(path), re.M)
        if match:
            return int(match[1])
    return 0


def name_kills(failures: list[dict[str, Any]], before: int) -> None:
    """If the kernel has killed a process since the workers started, when `kills` returned `before`,
    set ``error`` to `KILLED` in each of `failures` whose ``code`` is that of SIGKILL."""
    if kills() > before:
        for failure in failures:
            if failure["code"] == -signal.SIGKILL:
                failure["error"] = KILLED


def step_records(silent: Sequence[str], output: Path) -> list[dict[str, Any]]:
    """Return the record of a node whose step Slurm has ended for want of memory, by what Slurm has
    printed to the job's `output` since the last verdict; [] where it has printed nothing of that.
    `silent` are the nodes without a record, of which the first one counts where no line names one.
    """
    text = re.split(r"^hpc-ddp: attempt \d+: ", read_tail(output, TAIL_BYTES), flags=re.M)[-1]
    named = _OF_NODE.findall(text)
    if not (named or _OF_STEP.search(text)):
        return []
    node = next((name for name in silent if name in named), silent[0])
    failure = {"rank": None, "code": -signal.SIGKILL, "time": time.time(), "error": KILLED}
    return [{"node": node, "code": -signal.SIGKILL, "notice": None, "failures": [failure]}]


def _counters(proc: Path) -> list[Path]:
    """Return the files in which the kernel may count the kills in this process's memory cgroup,
    then in the cgroups above it; the files need not exist."""
    files = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        kind = "cgroup" if controllers else "cgroup2"
        for mount in _mounts(proc, kind):
            inside = PurePosixPath(group).relative_to("/")
            # Version 2 has the file only where the controller is switched on.
            files += [mount / at / _FILES[kind] for at in (inside, *inside.parents)]
    return files


def _mounts(proc: Path, kind: str) -> list[Path]:
    """Return where the file system `kind`, cgroup or cgroup2, is mounted; [] if it is not."""
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
