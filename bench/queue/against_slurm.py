"""Runs a short trace on a real slurmctld, and compares its start times with the simulator's.

``python bench/queue/against_slurm.py TRACE PLACE`` takes 32 jobs of the KTH trace of protocol.md
from a place between 0 and 1, with times of a sixtieth, on a test cluster of 8 nodes. Every fifth
job has ``--time-min=1``. Some ten minutes; as root, see tests/slurm/cluster.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "tests/slurm"), str(Path(__file__).parent)]

import cluster as real  # noqa: E402
from simulator import Cluster, Job, Settings, TimeMin  # noqa: E402
from traces import TRACES, read_jobs  # noqa: E402

NODES, COUNT, SCALE, LOAD = 8, 32, 60, 1.3


def short_trace(jobs: list[Job], place: float) -> list[Job]:
    """Return `COUNT` jobs that ran ten minutes to three hours, scaled, and so dense that they ask
    for `LOAD` times what the nodes have."""
    usable = [job for job in jobs if 600 <= job.run_s <= 3 * 3600]
    first = int(place * (len(usable) - COUNT))
    chosen = usable[first : first + COUNT]
    full = TRACES["kth"].nodes
    short = [
        Job(
            id=number,
            submit_s=job.submit_s - chosen[0].submit_s,
            nodes=-(-job.nodes * NODES // full),
            run_s=round(job.run_s / SCALE),
            limit_s=-(-job.limit_s // SCALE // 60) * 60,
            time_min_s=60 if number % 5 == 4 and job.limit_s > SCALE * 60 else 0,
        )
        for number, job in enumerate(chosen)
    ]
    span_s = sum(job.nodes * job.run_s for job in short) / NODES / LOAD
    stretch = span_s / short[-1].submit_s
    for job in short:
        job.submit_s = round(job.submit_s * stretch)
    return short


def run_really(jobs: list[Job], suite: str) -> tuple[list[float], float]:
    """Return the start times of jobs on a test cluster, in seconds after the first submit, and the
    second of the minute at that submit."""
    machine = real.Cluster.up(size=NODES, accounting=False, suite=suite)
    try:
        began, ids = time.time(), []
        for job in jobs:
            time.sleep(max(0.0, began + job.submit_s - time.time()))
            least = [f"--time-min={job.time_min_s // 60}"] if job.time_min_s else []
            command = ["sbatch", "--parsable", "--exclusive", f"-N{job.nodes}"]
            command += [f"-t{job.limit_s // 60}", *least, "-o/dev/null", "--no-requeue"]
            ids.append(machine.run(*command, f"--wrap=sleep {job.run_s}").stdout.strip())
        stamps: dict[str, str] = {}  # Slurm forgets jobs that ended ten minutes ago
        while len(stamps) < len(ids):
            time.sleep(10)
            lines = machine.run("squeue", "-h", "-t", "R,CG,CD,TO", "-o", "%i %S").stdout
            stamps |= dict(line.split() for line in lines.splitlines())
        times = [time.strptime(stamps[number], "%Y-%m-%dT%H:%M:%S") for number in ids]
        return [time.mktime(start) - began for start in times], began % 60
    finally:
        machine.down()


def simulate(jobs: list[Job], way: TimeMin, second: float) -> list[float]:
    """Return the start times in the model, whose first submit is at that second of a minute: the
    backfill rounds its reservations down to whole minutes."""
    jobs = [replace(job, submit_s=job.submit_s + second) for job in jobs]
    model = Cluster(Settings(NODES, bf_interval=2, bf_window=86400, time_min=way))
    model.submit(jobs)
    model.run(lambda: False)
    return [job.start_s - second for job in jobs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("place", type=float)
    parser.add_argument("--suite", default="", help="of Debian, for another Slurm")
    options = parser.parse_args()
    jobs = short_trace(read_jobs("kth", options.trace), options.place)
    starts, second = run_really(jobs, options.suite)
    way = TimeMin.STRETCHED if options.suite == "sid" else TimeMin.EXACT
    modelled = simulate(jobs, way, second)
    gaps = [abs(start - model) for start, model in zip(starts, modelled, strict=True)]
    for job, start, model in zip(jobs, starts, modelled, strict=True):
        print(
            f"job {job.id:2} submit {job.submit_s:4.0f} nodes {job.nodes} limit {job.limit_s:4}"
            f" run {job.run_s:4.0f} least {job.time_min_s:3} start {start:6.1f} model {model:6.1f}"
        )
    waits = [start - job.submit_s for start, job in zip(starts, jobs, strict=True)]
    model_waits = [start - job.submit_s for start, job in zip(modelled, jobs, strict=True)]
    print(
        f"place {options.place}, second {second:.0f}: {len(jobs)} jobs, of which"
        f" {sum(wait > 5 for wait in waits)} waited; mean wait {statistics.mean(waits):.1f} s,"
        f" model {statistics.mean(model_waits):.1f} s; starts within 5 s:"
        f" {sum(gap <= 5 for gap in gaps)}, median gap {statistics.median(gaps):.1f} s,"
        f" largest {max(gaps):.1f} s"
    )


if __name__ == "__main__":
    main()
