"""Replays the traces of protocol.md with a run of ours, by a fixed request and with --fit.

``python bench/queue/replay.py NAME TRACE`` prints a row for each window and variant, as CSV.
NAME is ``kth`` or ``theta``.
"""

from __future__ import annotations

import argparse
import copy
import csv
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from simulator import (
    Cluster,
    Job,
    Settings,
    TimeMin,
)
from traces import TRACES, read_jobs, submits

HOUR = 3600
LIMIT_S = 12 * HOUR
START_S, STOP_S = 180, 120  # of an attempt: until the first new step, and after the last
REQUEUE_S = 121
SCALING = 0.85  # twice the nodes are 1.8 times as fast


@dataclass(frozen=True)
class Variant:
    """A way to ask for nodes: `time_min_s` of 0 is the fixed request."""

    name: str
    work_s: int = 48 * HOUR
    time_min_s: int = 0
    time_min: TimeMin = TimeMin.EXACT
    is_rank_kept: bool = False
    range: tuple[float, float] = (1.0, 1.0)  # of nodes, as parts of those of the fixed request


def variants(name: str) -> Iterator[Variant]:
    """Yield the variants of protocol.md for a trace; each fixed request comes before what is
    compared to it."""
    yield Variant("48 h, fixed")
    for minutes in (60,) if name == "theta" else (60, 30, 120, 240):
        for way in TimeMin:
            yield Variant(f"48 h, {minutes} min, {way.value}", 48 * HOUR, minutes * 60, way)
    if name == "theta":
        return
    yield Variant("12 h, fixed", 12 * HOUR)
    yield from (Variant(f"12 h, 60 min, {w.value}", 12 * HOUR, HOUR, w) for w in TimeMin)
    yield Variant("48 h, rank kept, fixed", is_rank_kept=True)
    for way in TimeMin:
        yield Variant(f"48 h, rank kept, 60 min, {way.value}", 48 * HOUR, HOUR, way, True)


def ranges() -> Iterator[Variant]:
    """Yield the variants with a range of nodes, and fixed requests of more nodes beside them."""
    yield Variant("48 h, fixed")
    for more in (2.0, 4.0):
        name = f"48 h, fixed request, nodes x {more:g} to {more:g}"
        yield Variant(name, range=(more, more))
    for least, most in ((0.25, 1.0), (0.25, 2.0), (0.25, 4.0)):
        for way in TimeMin:
            name = f"48 h, 60 min, {way.value}, nodes x {least:g} to {most:g}"
            yield Variant(name, 48 * HOUR, HOUR, way, range=(least, most))


class Training(Job):
    """Our run: it works until shortly before the end of its limit, and is requeued. On `n` times
    the nodes of the fixed request it is ``n ** SCALING`` times as fast."""

    def __init__(self, number: int, submit_s: float, nodes: int, variant: Variant) -> None:
        least, most = (max(1, round(nodes * part)) for part in variant.range)
        super().__init__(number, submit_s, least, 0, LIMIT_S, variant.time_min_s, most_nodes=most)
        self.full_nodes = nodes
        self.left_s: float = variant.work_s
        self.attempts = 0
        self.finished_s = -1.0

    def on_start(self) -> None:
        self.attempts += 1
        speed = (self.mask.bit_count() / self.full_nodes) ** SCALING
        useful_s = max(0, self.granted_s - START_S - STOP_S)
        needed_s = self.left_s / speed
        is_last = useful_s >= needed_s
        self.run_s = START_S + needed_s if is_last else self.granted_s
        self.left_s = 0.0 if is_last else self.left_s - useful_s * speed

    def on_end(self, now: float) -> float | None:
        if self.left_s > 0:
            return now + REQUEUE_S
        self.finished_s = now
        return None


def queues(cluster: Cluster, times: list[float]) -> Iterator[bytes]:
    """Yield the pickled cluster just before each of these times, in a replay without our run."""
    for time_s in times:
        cluster.run(lambda: False, end_s=time_s - 0.001)
        cluster.started.clear()
        yield pickle.dumps(cluster)


def play(frozen: bytes, submit_s: float, end_s: float, nodes: int, variant: Variant) -> list[float]:
    """Return for one replay: submit to finished of our run, its attempts, the sum of the others'
    waits, and their number; times in hours."""
    cluster: Cluster = pickle.loads(frozen)
    cluster.settings = replace(
        cluster.settings, time_min=variant.time_min, is_rank_kept=variant.is_rank_kept
    )
    ours = Training(10**7, submit_s, nodes, variant)
    others = [
        job
        for _, _, _, job in cluster._events
        if job is not None and submit_s <= job.submit_s < end_s and job.start_s < 0
    ]
    awaited = len(others)
    cluster.submit([ours])
    seen = 0

    def is_over() -> bool:
        nonlocal seen, awaited
        for job, _ in cluster.started[seen:]:
            awaited -= job is not ours and submit_s <= job.submit_s < end_s
        seen = len(cluster.started)
        return ours.finished_s >= 0 and awaited == 0

    cluster.run(is_over)
    waits = [job.start_s - job.submit_s for job in others]
    return [(ours.finished_s - submit_s) / HOUR, ours.attempts, sum(waits) / HOUR, len(waits)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=TRACES)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--windows", default="0-19")
    parser.add_argument("--ranges", action="store_true", help="with ranges of nodes")
    options = parser.parse_args()
    jobs = read_jobs(options.name, options.trace)
    trace = TRACES[options.name]
    first, last = (int(word) for word in options.windows.split("-"))
    cluster = Cluster(Settings(trace.nodes))
    cluster.submit(copy.copy(job) for job in jobs)
    table = csv.writer(sys.stdout)
    table.writerow(["window", "nodes", "variant", "hours", "attempts", "waited_h", "others"])
    for window, (*times, end_s) in enumerate(submits(jobs, trace.places)):
        if not first <= window <= last:
            continue
        frozen = list(queues(cluster, times))
        for nodes in trace.run_sizes:
            for variant in ranges() if options.ranges else variants(options.name):
                if nodes * variant.range[0] > trace.nodes:
                    continue
                plays = [
                    play(queue, submit_s, end_s, nodes, variant)
                    for queue, submit_s in zip(frozen, times, strict=True)
                ]
                sums = [sum(column) for column in zip(*plays, strict=True)]
                figures = [sums[0] / len(times), sums[1] / len(times), sums[2], int(sums[3])]
                table.writerow([window, nodes, variant.name, *figures])
                sys.stdout.flush()


if __name__ == "__main__":
    main()
