"""Nodes and attempts that end without a word. Pure: no Slurm, no disk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import Cause
from hpc_ddp.core.journal.events import JournalEvent, NoticeGiven, VerdictGiven
from hpc_ddp.core.journal.journal import attempts_with_progress


def too_many_silent(
    spec: JobSpec, most_requeues: float, events: Sequence[JournalEvent], numbers: Sequence[int]
) -> str | None:
    """Return why no attempt may follow the last one; None where one may, and before the first.

    An attempt may not follow where the last one ended without a verdict and the run has had more
    starts than a bound on requeues permits, or where too many attempts in a row ended without a
    verdict and without a checkpoint. Superseded attempts count as ones without a verdict: Slurm has
    started the job again by itself, as after each node that goes down.

    `events`, and the attempts' `numbers` (ascending), are those since the run's last submit;
    `most_requeues` is the operators' limit, inf without one.
    """
    verdicts = [event for event in events if isinstance(event, VerdictGiven)]
    decided = {v.attempt for v in verdicts if v.cause != Cause.SUPERSEDED}
    judged = decided | {verdict.attempt for verdict in verdicts if verdict.progress}
    saved = attempts_with_progress(events)
    noticed = {event.attempt for event in events if isinstance(event, NoticeGiven)}
    silent = [number for number in numbers if number not in judged]
    most = math.inf if spec.max_requeues is None else spec.max_requeues
    failed = sum(verdict.cause == Cause.FAILED for verdict in verdicts)
    for starts, bound in ((len(numbers) - failed, most), (len(numbers), most_requeues)):
        if numbers and numbers[-1] not in decided and starts > bound:
            times = f"{starts} times (max-requeues is {bound})"
            return f"it was started {times}, and Slurm has started it again"
    row = takewhile(lambda number: number in silent and number not in saved, reversed(numbers))
    # Slurm ends a preempted job that takes too long, and with it the batch shell: no crash of ours.
    if (crashes := sum(number not in noticed for number in row)) > most_in_a_row(spec):
        return f"{crashes} attempts in a row ended without a verdict, and without a checkpoint"
    return None


def most_in_a_row(spec: JobSpec) -> int:
    """Return how many attempts may follow each other without anything that shows progress."""
    return 3 * max(1, spec.max_failures)


def silent_nodes(
    spec: JobSpec, nodes: Sequence[str], records: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the nodes, sorted, that lack the record of a task's end; ``left`` ones don't count.
    How many tasks a node has had is in its records: the user may have edited the batch script."""
    counted = [record for record in records if not record.get("left")]
    heard = Counter(record["node"] for record in counted)
    tasks = {record["node"]: record.get("tasks", spec.tasks_per_node) for record in counted}
    return sorted(node for node in nodes if heard[node] < tasks.get(node, 1))


def few_of(silent: Sequence[str], nodes: Sequence[str]) -> Sequence[str]:
    """Return the silent nodes of an attempt where they are few: one of three or more, or a tenth of
    all. Else [], since the cause may then be anywhere."""
    return silent if len(nodes) > 2 and len(silent) <= max(1, len(nodes) // 10) else []


def never_began(verdict: VerdictGiven) -> bool:
    """Tell whether an attempt ended as `NODE_LOST` before its first step, and no node was blamed
    for it."""
    return verdict.cause == Cause.NODE_LOST and verdict.step is None and not verdict.bad_nodes


def ended_silently(verdict: VerdictGiven) -> bool:
    """Tell whether an attempt was `NODE_LOST` after a step, with nothing saved and no bad node."""
    excused = verdict.progress or verdict.bad_nodes or verdict.step is None
    return verdict.cause == Cause.NODE_LOST and not excused
