"""The traces of protocol.md: where they are, their checksums, and their jobs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from simulator import Job

WINDOWS = 20
LEAST_A_DAY = 10  # submits: a trace begins with the first day that has more


@dataclass(frozen=True)
class Trace:
    """A trace: `columns` are those of submit, run time, nodes and time limit in a line."""

    nodes: int
    sha256: str
    columns: tuple[int, int, int, int]
    run_sizes: tuple[int, ...]
    places: tuple[float, ...]  # of a window, at which our run is submitted


TRACES = {
    "kth": Trace(
        100,
        "df76b94e5f670db52179688a98deec3e1887d10adb39f96c900b8e92abb386ab",
        (1, 3, 7, 8),
        (4, 16, 32),
        (0.10, 0.25, 0.40),
    ),
    "theta": Trace(
        4392,
        "c1e737e6ef3883f90f4dfb4886cdc4c206b8f5d7714c6087b60138d8bb5b50d2",
        (1, 3, 4, 5),
        (64, 256, 1024),
        (0.25,),
    ),
}


def read_jobs(name: str, path: Path) -> list[Job]:
    """Return a trace's jobs by their submit; those without run time or nodes are left out.

    Raise ValueError for a file with another checksum.
    """
    trace, content = TRACES[name], path.read_bytes()
    if hashlib.sha256(content).hexdigest() != trace.sha256:
        raise ValueError(f"{path} is not the {name} trace of protocol.md: another checksum")
    jobs: list[Job] = []
    for line in content.decode(errors="replace").splitlines():
        if not line or line.startswith(";"):
            continue
        words = line.split()
        submit_s, run_s, nodes, limit_s = (int(float(words[at])) for at in trace.columns)
        if run_s <= 0 or not 0 < nodes <= trace.nodes or limit_s <= 0:
            continue
        limit_s = -(-limit_s // 60) * 60
        jobs.append(Job(len(jobs), submit_s, nodes, min(run_s, limit_s), limit_s))
    jobs.sort(key=lambda job: (job.submit_s, job.id))
    a_day_later = zip(jobs, jobs[LEAST_A_DAY:], strict=False)
    first = next(job for job, other in a_day_later if other.submit_s - job.submit_s < 86400)
    return jobs[jobs.index(first) :]


def submits(jobs: list[Job], places: tuple[float, ...]) -> list[list[float]]:
    """Return for each window the times at which our run is submitted, and the window's end."""
    first_s, last_s = jobs[0].submit_s, jobs[-1].submit_s
    length_s = (last_s - first_s) / WINDOWS
    begins = [first_s + length_s * window for window in range(WINDOWS)]
    return [[*(begin + length_s * place for place in places), begin + length_s] for begin in begins]
