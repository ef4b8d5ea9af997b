"""The holes that a trace leaves: how soon a run is finished that takes each of them, and no more.

``python bench/queue/holes.py NAME TRACE`` replays a trace without a run of ours, and adds up the
time in which enough nodes are idle, from each of the submits of protocol.md on. The run is
clairvoyant: it knows how long a hole lasts, gives the nodes back at its very end, and delays
nobody; each hole costs it a start and a stop. Prints CSV: window, nodes, hours until 48 h of work
are done, holes used.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


from replay import HOUR, START_S, STOP_S
from simulator import Cluster, Settings
from traces import TRACES, read_jobs, submits

WORK_S = 48 * HOUR


def idle_nodes(cluster: Cluster) -> list[tuple[float, int]]:
    """Return the times at which the number of idle nodes changes, and the number from then on."""
    changes = []
    for job, start_s in cluster.started:
        changes += [(start_s, -job.nodes), (start_s + min(job.run_s, job.granted_s), job.nodes)]
    idle, steps = cluster.settings.nodes, []
    for time_s, change in sorted(changes):
        idle += change
        steps.append((time_s, idle))
    return steps


def hours_in_holes(
    steps: list[tuple[float, int]], submit_s: float, nodes: int
) -> tuple[float, int]:
    """Return the hours from a submit until the work is done in the holes of at least so many nodes,
    and their number; inf hours where the trace ends before."""
    left_s, holes, begin_s = float(WORK_S), 0, -1.0
    for (time_s, idle), (next_s, _) in itertools.pairwise(steps):
        if next_s <= submit_s:
            continue
        if idle >= nodes and begin_s < 0:
            begin_s = max(time_s, submit_s)
        is_closed = idle < nodes and begin_s >= 0
        hole_s = time_s - begin_s - START_S - STOP_S if is_closed else 0.0
        if hole_s > 0:
            holes += 1
            if hole_s >= left_s:
                return (begin_s + START_S + left_s - submit_s) / HOUR, holes
            left_s -= hole_s
        if is_closed:
            begin_s = -1.0
    return float("inf"), holes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=TRACES)
    parser.add_argument("trace", type=Path)
    options = parser.parse_args()
    jobs = read_jobs(options.name, options.trace)
    trace = TRACES[options.name]
    cluster = Cluster(Settings(trace.nodes))
    cluster.submit(copy.copy(job) for job in jobs)
    cluster.run(lambda: False)
    steps = idle_nodes(cluster)
    table = csv.writer(sys.stdout)
    table.writerow(["window", "nodes", "hours", "holes"])
    for window, (*times, _) in enumerate(submits(jobs, trace.places)):
        for nodes in trace.run_sizes:
            plays = [hours_in_holes(steps, submit_s, nodes) for submit_s in times]
            means = [sum(column) / len(times) for column in zip(*plays, strict=True)]
            table.writerow([window, nodes, *means])


if __name__ == "__main__":
    main()
