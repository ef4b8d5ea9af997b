"""Faults for the soak: what there is, and which one comes when, as a function of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

GAP_S = (20.0, 60.0)  # from one fault to the next
WORKERS = 2  # on each node


@dataclass(frozen=True)
class Lane:
    """One run after the other: when one is through, the next takes its place.

    The runs of a chain go on by a new job each time; the others are requeued, and change between
    the slurm and the submitit back-end.
    """

    nodes: int
    chain: bool = False


LANES = (Lane(nodes=2), Lane(nodes=1), Lane(nodes=1, chain=True))
ALL = (0, 1, 2)


@dataclass(frozen=True)
class Kind:
    """What a fault is, for people.

    Attributes
    ----------
    is_there
        what happens, and how it goes away by itself
    lasts
        seconds until then
    lanes
        the runs that it may befall
    fails
        it ends an attempt as failed. Twice in a row without a checkpoint would end the run, and
        rightly, so the second one is left out.
    steps
        it comes only while the run takes steps
    """

    is_there: str
    lasts: float = 0.0
    lanes: tuple[int, ...] = ALL
    fails: bool = False
    steps: bool = False


KINDS = {
    "preempted": Kind("a better job takes its nodes for 3 s, after a notice"),
    "preempted without notice": Kind("the same with GraceTime=0", lasts=10),
    "worker killed": Kind("kill -9", fails=True),
    "worker terminated": Kind("SIGTERM to one worker alone", fails=True),
    "worker stopped": Kind("SIGSTOP, and SIGCONT after 10 s", lasts=10),
    "agent killed": Kind("kill -9 of a node's torchrun", fails=True),
    "supervisor killed": Kind("kill -9 of a node's task", fails=True),
    "srun killed": Kind("kill -9 of the step's srun, on the first node"),
    # Slurm takes a job for failed whose batch shell dies (0:9, JobLaunchFailure), and nobody is
    # left to requeue it: only a chain has its next job in the queue already.
    "batch shell killed": Kind("kill -9 of the job's script", lanes=(2,)),
    # A job of a chain is not to be requeued: scontrol refuses.
    "requeued by hand": Kind("scontrol requeue", lanes=(0, 1)),
    "link cut for 5 s": Kind("before Slurm takes note of it", lasts=5),
    "link cut for 60 s": Kind("Slurm gives the node up after 30 s", lasts=60),
    "slurmd dead for 20 s": Kind("before Slurm takes note of it", lasts=20),
    "slurmd dead for 50 s": Kind("Slurm gives the node up after 30 s", lasts=50),
    "slurmctld restarted": Kind("at once"),
    "slurmctld frozen": Kind("SIGSTOP, and SIGCONT after 15 s", lasts=15),
    "byte flipped": Kind("in the newest checkpoint; a worker is killed at once", fails=True),
    "file cut short": Kind("in the newest checkpoint; a worker is killed at once", fails=True),
    "scratch full": Kind("a file takes all space for 10 s", lasts=10, steps=True),
    "scratch read-only": Kind("on all nodes for 10 s", lasts=10, steps=True),
}


@dataclass(frozen=True)
class Fault:
    """One fault: `at` in seconds from the start; `lane`, `node` and `rank` are indices.

    The node is one of the run's own, and each kind uses what it needs of them.
    """

    at: float
    kind: str
    lane: int
    node: int
    rank: int


def schedule(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of so many seconds. Each kind comes once before any comes again."""
    dice = random.Random(seed)
    faults: list[Fault] = []
    deck: list[str] = []
    at = dice.uniform(*GAP_S)
    while at < seconds:
        if not deck:
            deck = list(KINDS)
            dice.shuffle(deck)
        kind = deck.pop()
        lane = dice.choice(KINDS[kind].lanes)
        nodes = LANES[lane].nodes
        node, rank = dice.randrange(nodes), dice.randrange(nodes * WORKERS)
        faults.append(Fault(round(at, 1), kind, lane, node, rank))
        at += dice.uniform(*GAP_S)
    return faults


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def plan(faults: Sequence[Fault]) -> str:
    """Return the schedule as a table."""
    rows = [(f"{f.at:.1f}", f.kind, f.lane, f.node, f.rank) for f in faults]
    return table(("second", "fault", "run", "node", "rank"), rows)
