"""A model of Slurm's scheduling of whole nodes: the main scheduler and the backfill.

It follows ``_attempt_backfill`` of Slurm's ``backfill.c`` (22.05): pending jobs in the order of
their priority, a reservation for each on definite nodes, running jobs to end at their limits. Sets
of nodes are bits of an integer. Not modelled: several partitions, fair share, preemption, failures,
and limits of a user. Times are seconds.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

SUBMIT, END, BACKFILL = 1, 0, 2  # ends first, and the backfill sees both


class TimeMin(Enum):
    """The limit that a backfilled job with ``--time-min`` gets.

    EXACT: the least time, as Slurm 20.11, 22.05 and 24.11 do; STRETCHED: as long as no reservation
    is in its way, as 26.05 does.
    """

    EXACT = "exact"
    STRETCHED = "stretched"


@dataclass(slots=True, eq=False)
class Job:
    """A job: `limit_s` is the time limit asked for, `granted_s` that of its newest start; `mask`
    has its nodes, `nodes` of them or up to `most_nodes`. `rank`, then `id`, is its place in the
    queue, the least first."""

    id: int
    submit_s: float
    nodes: int
    run_s: float
    limit_s: int
    time_min_s: int = 0
    rank: float = 0.0
    start_s: float = -1.0
    granted_s: int = 0
    mask: int = 0
    most_nodes: int = 0

    def choose(self, free: int) -> int:
        """Return the nodes to take of those that are free, which suffice."""
        return lowest(free, max(self.nodes, min(self.most_nodes, free.bit_count())))

    @property
    def planned_s(self) -> int:
        return self.time_min_s or self.limit_s

    @property
    def end_by_limit_s(self) -> float:
        return self.start_s + self.granted_s

    def order(self) -> tuple[float, int]:
        return self.rank, self.id

    def on_start(self) -> None:
        """Learn of a start; a subclass sets `run_s` for the limit that it got."""

    def on_end(self, now: float) -> float | None:
        """Return when the job is eligible again, or None where it is over."""
        return None


@dataclass
class Settings:
    """A cluster's settings; names and units of ``slurm.conf``, but all in seconds."""

    nodes: int
    bf_interval: int = 30
    bf_resolution: int = 60
    bf_window: int = 60 * 3600
    bf_max_job_test: int = 500
    time_min: TimeMin = TimeMin.EXACT
    is_rank_kept: bool = False  # at a requeue, as by priority/basic; by age it begins anew


@dataclass
class Cluster:
    """The queue and the nodes at one moment; `run` moves it on."""

    settings: Settings
    now: float = 0.0
    busy: int = 0
    pending: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    started: list[tuple[Job, float]] = field(default_factory=list)
    _events: list[tuple[float, int, int, Job | None]] = field(default_factory=list)
    _count: int = 0
    _backfill_due: bool = False

    @property
    def all_nodes(self) -> int:
        return (1 << self.settings.nodes) - 1

    @property
    def next_event_s(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def submit(self, jobs: Iterable[Job]) -> None:
        """Let jobs come at their `submit_s`."""
        for job in jobs:
            self._push(job.submit_s, SUBMIT, job)

    def run(self, until: Callable[[], bool], end_s: float = math.inf) -> None:
        """Move on event by event, until `until` holds, nothing is left, or the next event comes
        after `end_s`."""
        while self._events and self._events[0][0] <= end_s and not until():
            self.now = self._events[0][0]
            is_backfill = has_changed = False
            while self._events and self._events[0][0] == self.now:
                _, kind, _, job = heapq.heappop(self._events)
                if kind == BACKFILL:
                    is_backfill = True
                elif job is not None:
                    has_changed = True
                    self._take(kind, job)
            if has_changed:
                self._main()
                self._wake_backfill()
            if is_backfill:
                self._backfill_due = False
                self._backfill()

    def _push(self, at_s: float, kind: int, job: Job | None) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, kind, self._count, job))

    def _take(self, kind: int, job: Job) -> None:
        """Queue a job that comes, or free the nodes of one that ends."""
        if kind == SUBMIT:
            if not (self.settings.is_rank_kept and job.rank):
                job.rank = self.now
            insort(self.pending, job, key=Job.order)
            return
        self.busy &= ~job.mask
        self.running.remove(job)
        eligible_s = job.on_end(self.now)
        if eligible_s is not None:
            self._push(eligible_s, SUBMIT, job)

    def _wake_backfill(self) -> None:
        if self.pending and not self._backfill_due:
            step = self.settings.bf_interval
            self._push((self.now // step + 1) * step, BACKFILL, None)
            self._backfill_due = True

    def _start(self, job: Job, mask: int, granted_s: int) -> None:
        job.mask, job.start_s, job.granted_s = mask, self.now, granted_s
        self.busy |= mask
        job.on_start()
        self.started.append((job, self.now))
        insort(self.running, job, key=lambda other: other.end_by_limit_s)
        self._push(self.now + min(job.run_s, granted_s), END, job)

    def _main(self) -> None:
        """Start jobs in their order, with their whole limits, up to the first that has no room."""
        count = 0
        for job in self.pending:
            free = self.all_nodes & ~self.busy
            if free.bit_count() < job.nodes:
                break
            self._start(job, job.choose(free), job.limit_s)
            count += 1
        del self.pending[:count]

    def _backfill(self) -> None:
        """Plan the pending jobs in their order, and start those whose plan begins now.

        A plan lasts for one call, so it ends before jobs that can't start now: those that need more
        than is idle, or as much as a job before them, for as long, that could not.
        """
        plan = _Plan(self)
        jobs = self.pending[: self.settings.bf_max_job_test]
        last = len(jobs) - 1
        refused: list[Job] = []
        began = set()
        for place, job in enumerate(jobs):
            free = (self.all_nodes & ~self.busy).bit_count()
            while last >= place and _can_not_start(jobs[last], free, refused):
                last -= 1
            if place > last:
                break
            mask = plan.place(job)
            if mask:
                self._start(job, mask, plan.limit_for(job, mask))
                began.add(job.id)
            elif not _can_not_start(job, free, refused):
                refused.append(job)
        if began:
            self.pending = [job for job in self.pending if job.id not in began]


def _can_not_start(job: Job, free: int, refused: list[Job]) -> bool:
    return job.nodes > free or any(
        job.nodes >= other.nodes and job.planned_s >= other.planned_s for other in refused
    )


class _Plan:
    """The reservations of one call of the backfill: spans of time with the nodes that no pending
    job has, in their order and without a gap. Running jobs are not in it, as in Slurm."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.now = cluster, cluster.now
        self.step = cluster.settings.bf_resolution
        self.end_s = self.now + cluster.settings.bf_window
        self.spans = [(self._rounded(self.now), math.inf, cluster.all_nodes)]

    def _rounded(self, time_s: float) -> float:
        return time_s // self.step * self.step

    def place(self, job: Job) -> int:
        """Return the nodes on which a job can start now; else reserve nodes for it, where its start
        lies in the window, and return 0."""
        limit_s = job.planned_s
        earliest_s, is_later = self.now, True
        while is_later:
            nodes, later_s = self._unreserved(earliest_s, earliest_s + limit_s)
            if nodes.bit_count() < job.nodes:
                is_later, earliest_s = later_s is not None, later_s or 0.0
                continue
            start_s, mask = self._first_start(nodes, job)
            start_s = max(start_s, earliest_s)
            if start_s <= self.now:
                return mask
            if later_s is not None and start_s > later_s:
                earliest_s = later_s
                continue
            if start_s > self.end_s:
                return 0
            begin_s, end_s = self._rounded(start_s), self._rounded(start_s + limit_s)
            if start_s > earliest_s and self._overlaps(mask, begin_s, end_s):
                earliest_s = start_s
                continue
            self._reserve(begin_s, end_s, mask)
            return 0
        return 0

    def limit_for(self, job: Job, mask: int) -> int:
        """Return the limit of a job that starts now on these nodes, in whole minutes."""
        if not job.time_min_s:
            return job.limit_s
        if self.cluster.settings.time_min == TimeMin.EXACT:
            return job.time_min_s
        until_s = self.now + job.limit_s
        for begin_s, _, nodes in self.spans[1:]:
            if begin_s < until_s and mask & ~nodes:
                until_s = begin_s
                break
        return max(job.time_min_s, min(job.limit_s, int(until_s - self.now) // 60 * 60))

    def _unreserved(self, begin_s: float, end_s: float) -> tuple[int, float | None]:
        """Return the nodes without a reservation all that time, and when it is worth another try:
        the end of the first span after which there are others."""
        nodes = self.cluster.all_nodes
        later_s = None
        for place, (span_begin_s, span_end_s, free) in enumerate(self.spans):
            if span_end_s <= begin_s:
                continue
            if later_s is None and place + 1 < len(self.spans):
                following = self.spans[place + 1][2]
                if following & ~(nodes & free):
                    later_s = span_end_s
            if span_begin_s > end_s:
                break
            nodes &= free
        return nodes, later_s

    def _first_start(self, nodes: int, waiting: Job) -> tuple[float, int]:
        """Return when enough of these nodes are free of running jobs, and which are taken.

        Slurm removes running jobs in groups, by a window that doubles from 30 s, and takes the end
        of the last of a group.
        """
        busy = self.cluster.busy
        free = nodes & ~busy
        if free.bit_count() >= waiting.nodes:
            return self.now, waiting.choose(free)
        window_s, first_s, last_s = 30, -1.0, self.now
        for job in self.cluster.running:
            if not job.mask & nodes:
                continue
            if first_s >= 0 and job.end_by_limit_s > first_s + window_s:
                if free.bit_count() >= waiting.nodes:
                    break
                window_s, first_s = window_s * 2, -1.0
            free |= job.mask & nodes
            first_s = job.end_by_limit_s if first_s < 0 else first_s
            last_s = job.end_by_limit_s
        return max(last_s, self.now + 1), waiting.choose(free)

    def _overlaps(self, mask: int, begin_s: float, end_s: float) -> bool:
        return any(
            span_end_s > begin_s and span_begin_s < end_s and mask & ~free
            for span_begin_s, span_end_s, free in self.spans
        )

    def _reserve(self, begin_s: float, end_s: float, mask: int) -> None:
        spans = []
        for span_begin_s, span_end_s, free in self.spans:
            cuts = [cut for cut in (begin_s, end_s) if span_begin_s < cut < span_end_s]
            edges = [span_begin_s, *cuts, span_end_s]
            for left_s, right_s in pairwise(edges):
                is_taken = begin_s <= left_s < end_s
                spans.append((left_s, right_s, free & ~mask if is_taken else free))
        self.spans = spans


def lowest(mask: int, count: int) -> int:
    """Return the `count` lowest bits of a mask that has at least as many."""
    if mask.bit_count() == count:
        return mask
    low, high = 0, mask.bit_length()
    while low < high:
        middle = (low + high) // 2
        if (mask & ((1 << middle) - 1)).bit_count() < count:
            low = middle + 1
        else:
            high = middle
    return mask & ((1 << low) - 1)
