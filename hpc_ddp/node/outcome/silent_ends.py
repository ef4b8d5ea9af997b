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
    """Return the reason why no attempt may follow the last one; None where one may, and where
    `numbers` is empty.

    No attempt may follow where the last one ended without a verdict and the run has had more starts
    than a bound on requeues permits, or where too many attempts in a row ended without a verdict,
    a checkpoint and a notice. A verdict ``superseded`` counts as none, unless its attempt has
    saved: Slurm has started the job again by itself, as after each node that goes down.

    `events`, and the attempts' `numbers` (ascending), are those since the run's last submit;
    `most_requeues` is the operators' limit, inf without one. Starts after failures count for that
    limit, but not for the job's own ``max_requeues``.
    """
    verdicts = [event for event in events if isinstance(event, VerdictGiven)]
    with_verdict = {v.attempt for v in verdicts if v.cause != Cause.SUPERSEDED}
    failures = sum(verdict.cause == Cause.FAILED for verdict in verdicts)
    most = math.inf if spec.max_requeues is None else spec.max_requeues
    for starts, bound in ((len(numbers) - failures, most), (len(numbers), most_requeues)):
        if numbers and numbers[-1] not in with_verdict and starts > bound:
            times = f"{starts} times (max-requeues is {bound})"
            return f"it was started {times}, and Slurm has started it again"
    with_progress = {verdict.attempt for verdict in verdicts if verdict.progress}
    with_progress |= attempts_with_progress(events)
    row = takewhile(lambda n: n not in with_verdict | with_progress, reversed(numbers))
    # Slurm ends a preempted job that takes too long, and with it the batch shell: no crash of ours.
    with_notice = {event.attempt for event in events if isinstance(event, NoticeGiven)}
    if (crashes := sum(number not in with_notice for number in row)) > most_in_a_row(spec):
        return f"{crashes} attempts in a row ended without a verdict, and without a checkpoint"
    return None


def most_in_a_row(spec: JobSpec) -> int:
    """Return how many attempts in a row may end without a newer checkpoint."""
    return 3 * max(1, spec.max_failures)


def silent_nodes(
    spec: JobSpec, nodes: Sequence[str], records: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the `nodes`, sorted, of which not all tasks have recorded their end in `records`.
    Records with ``left`` don't count: their nodes have left an elastic job. How many tasks a node
    has had is in its records: the user may have edited the batch script. Raise KeyError for a
    record without ``node``."""
    counted = [record for record in records if not record.get("left")]
    records_of = Counter(record["node"] for record in counted)
    tasks = {record["node"]: record.get("tasks", spec.tasks_per_node) for record in counted}
    return sorted(node for node in nodes if records_of[node] < tasks.get(node, 1))


def keep_few(silent: Sequence[str], nodes: Sequence[str]) -> Sequence[str]:
    """Return `silent`, the silent nodes among an attempt's `nodes`, where they are few: one of
    three or more nodes, or at most a tenth. Else [], since the cause may then be anywhere."""
    return silent if len(nodes) > 2 and len(silent) <= max(1, len(nodes) // 10) else []


def never_began(verdict: VerdictGiven) -> bool:
    """Tell whether a verdict is `NODE_LOST` before the first step, and blames no node."""
    return verdict.cause == Cause.NODE_LOST and verdict.step is None and not verdict.bad_nodes


def ended_silently(verdict: VerdictGiven) -> bool:
    """Tell whether a verdict is `NODE_LOST` after a step, without progress, and blames no node."""
    is_excused = verdict.progress or verdict.bad_nodes or verdict.step is None
    return verdict.cause == Cause.NODE_LOST and not is_excused
