"""The bounds by which a run is given up, in place of a further attempt. Pure: no Slurm, no disk.

``max_requeues`` 0 permits no requeue at all. More than three times ``max_failures`` attempts in a
row without a newer checkpoint end a run, whatever their causes; preemptions do not count. So do as
many failures in a row, with checkpoints or without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import Bound, Cause
from hpc_ddp.core.journal.events import (
    JournalEvent,
    NoticeGiven,
    VerdictGiven,
    WorkerStarted,
)
from hpc_ddp.core.journal.journal import attempts_with_progress
from hpc_ddp.node.outcome.attempt_facts import EARLY_S, AttemptFacts

NOT_SEEN = "the script saves by itself, if at all, so that its progress can't be seen"


class Refusal(NamedTuple):
    """The bound that permits no further attempt, and the reason in words."""

    text: str
    bound: Bound = Bound.OTHER


def find_refusal(facts: AttemptFacts, cause: Cause) -> Refusal | None:
    """Return the bound by which no attempt may follow this one, which ended with `cause`; None
    where one may. The bounds on the whole run come first, then those on attempts in a row. Raise
    KeyError or TypeError for a damaged record."""
    spec = facts.spec
    if over_text := over_budget(spec, facts.gpu_hours) or over_requeues(facts, cause):
        return Refusal(over_text)
    if cause == Cause.FAILED:
        return _refuse_retry(facts)
    if cause == Cause.BAD_NODE:
        row = list(takewhile(lambda v: v.cause == cause, reversed(facts.verdicts)))
        if len(row) >= spec.max_failures:
            return Refusal(f"the preflights of {len(row) + 1} attempts in a row have failed")
    if cause == Cause.NODE_LOST and facts.step is None:
        # Maybe no node was lost, and nothing can start here: a wrong --python, a full disk.
        is_alone = len(facts.nodes) == 1
        row = list(takewhile(partial(never_began, is_alone=is_alone), reversed(facts.verdicts)))
        if len(row) >= spec.max_failures and not facts.lost_nodes:
            return Refusal(f"nothing was heard of the workers in {len(row) + 1} attempts")
    count = _count_without_progress(facts, cause)
    if count > most_in_a_row(spec):
        return _no_progress(f"{count} attempts in a row have ended without a newer checkpoint")
    if cause == Cause.NODE_LOST and facts.is_ours and not (facts.progress or facts.lost_nodes):
        row = list(takewhile(ended_silently, reversed(facts.verdicts)))
        if len(row) >= spec.max_failures:  # killed for want of memory, say, each time
            return _no_progress(
                f"{len(row) + 1} attempts in a row ended so, without a newer checkpoint"
            )
    return _refuse_more_time(facts) if cause == Cause.TIME_LIMIT else None


def _no_progress(text: str) -> Refusal:
    """Return the refusal of a run without progress."""
    return Refusal(text, Bound.NO_PROGRESS)


def _refuse_more_time(facts: AttemptFacts) -> Refusal | None:
    """Return the bound by which no attempt may follow one that ended at its time limit; None where
    one may. A script without hpc_ddp.training may save by itself: with ``max_requeues`` it has no
    other bound."""
    spec = facts.spec
    if facts.is_ours:
        return _refuse_second_without_progress(facts)
    if spec.max_requeues is not None:
        return None
    if facts.find_event(WorkerStarted) and (refusal := _refuse_second_without_progress(facts)):
        return _no_progress(f"{refusal.text}, and without a step (--max-requeues allows more)")
    count = 1 + sum(v.cause == Cause.TIME_LIMIT for v in facts.verdicts)
    if count > most_in_a_row(spec) * spec.parts_of_time:
        text = f"{NOT_SEEN}; {count} attempts have ended so (--max-requeues allows more)"
        return Refusal(text, Bound.UNSEEN_PROGRESS)
    return None


def over_requeues(facts: AttemptFacts, cause: Cause) -> str | None:
    """Return the reason why a bound permits no requeue after an end with `cause`; None where none
    does. The operators' bound counts all requeues, ``max_requeues`` those after other causes than
    `FAILED`; ``max_requeues`` 0 permits none at all."""
    most, count = facts.spec.max_requeues, len(facts.verdicts)
    if most == 0:
        return "it must not be started twice (--max-requeues 0)"
    if count >= facts.most_requeues:
        return f"it was requeued {count} times, which this cluster limits (max-requeues)"
    requeues = sum(verdict.cause != Cause.FAILED for verdict in facts.verdicts)
    if cause != Cause.FAILED and most is not None and requeues >= most:
        return f"it was requeued {requeues} times already (--max-requeues)"
    return None


def _count_without_progress(facts: AttemptFacts, cause: Cause) -> int:
    """Return the number of attempts in a row, the last of them this one, that brought no newer
    checkpoint; 0 where this one has saved, or where its `cause` is excused.

    Excused are preemptions, Slurm's own requeues, and, for a script without hpc_ddp.training, time
    limits. Lost nodes are not: a job may crash its nodes. An earlier attempt with an excused cause
    is not counted. With hpc_ddp.training the row goes on before it; without, the row ends there,
    since the script may have saved in it.
    """
    excused = {Cause.PREEMPTED, Cause.SUPERSEDED, *(() if facts.is_ours else (Cause.TIME_LIMIT,))}
    if cause in excused or facts.progress:
        return 0
    row_ends = () if facts.is_ours else excused
    row = takewhile(lambda v: not v.progress and v.cause not in row_ends, reversed(facts.verdicts))
    return 1 + sum(verdict.cause not in excused for verdict in row)


def over_budget(spec: JobSpec, gpu_hours: float) -> str | None:
    """Return the text that a run has used up the budget of its `spec` with `gpu_hours`; None where
    it has not, or has no budget."""
    budget = spec.budget_gpu_hours
    if budget is None or gpu_hours < budget:
        return None
    return f"{gpu_hours:.3g} of {budget:g} GPU hours are spent (--budget-gpu-hours)"


def _refuse_retry(facts: AttemptFacts) -> Refusal | None:
    """Return the bound by which no attempt may follow this one, which has failed; None where one
    may.

    None may follow an error of the script that would come again, as many failures as
    ``max_failures`` permits since the newest checkpoint, or two attempts in a row without a newer
    one. Failures that each come after a newer checkpoint have a bound, too: ``max_failures`` for
    the same error of the script in a row, three times as many for any in a row. Once the run has
    done steps, of failures before an attempt's first step only ``max_failures`` counts: the start
    has worked before, and data that are away for a while come back."""
    failure = facts.failure
    is_broken = bool(facts.broken_nodes)  # the next attempt is kept off the broken node
    is_of_script = failure and failure.kind in ("exception", "exit", "left") and not is_broken
    with_steps = facts.attempts_with_steps
    if is_of_script and not facts.worked_attempts:
        early = f"in the first {EARLY_S / 60:.0f} minutes"
        time = early if facts.is_plain else "before the first step"
        return Refusal(f"it came {time}, and would come again")
    if failure and failure.is_of_usage and facts.attempt in with_steps:  # else the node's, maybe
        return Refusal("it is an error of the script, and would come again")
    last = facts.verdicts[-1] if facts.verdicts else None
    # A hang is no error of the step: a disk or the network may have stood still.
    error = failure.error if failure and failure.kind not in ("hang", "disk") else ""
    is_same = last and error and (last.error, last.step) == (error, facts.step)
    # A restored checkpoint's step, if any, is that of both attempts where neither did one.
    if is_same and not is_broken and last and with_steps & {last.attempt, facts.attempt}:
        return Refusal("the same error came at the same step in the attempt before")
    retries, most = _count_retries(facts), facts.spec.max_failures
    if retries >= most:
        were = "retry was" if retries == 1 else "retries were"
        return Refusal(f"{retries} {were} made already (--max-failures)")
    row = list(takewhile(lambda v: v.cause == Cause.FAILED, reversed(facts.verdicts)))
    same_errors = list(takewhile(lambda v: v.error == error, row)) if is_of_script and error else []
    if len(same_errors) >= most:  # a part of each epoch that fails, say, behind the save
        count = len(same_errors) + 1
        return Refusal(f"the same error came in {count} attempts in a row (--max-failures)")
    if len(row) >= most_in_a_row(facts.spec):
        text = f"{len(row) + 1} attempts in a row have failed, though with newer checkpoints"
        return Refusal(f"{text} (--max-failures)")
    # With the disk away no checkpoint could be read or written: that shows no lack of progress.
    is_excused = facts.attempt not in with_steps or (failure and failure.kind == "disk")
    return None if is_excused else _refuse_second_without_progress(facts)


def _count_retries(facts: AttemptFacts) -> int:
    """Return how many of the earlier attempts have failed since the run's newest checkpoint, the
    attempt that saved it among them. A time limit stands for the checkpoint of a script without
    hpc_ddp.training, whose own are not seen."""
    row_starts = attempts_with_progress(facts.events)
    for verdict in facts.verdicts:
        if verdict.progress if facts.is_ours else verdict.cause == Cause.TIME_LIMIT:
            row_starts.add(verdict.attempt)
    newest = max(row_starts, default=0)
    return sum(v.cause == Cause.FAILED and v.attempt >= newest for v in facts.verdicts)


def _refuse_second_without_progress(facts: AttemptFacts) -> Refusal | None:
    """Return the reason to give up where the last earlier attempt with a verdict had failed, or run
    into its time limit, and saved nothing, and nothing was saved since; None otherwise. Failures
    before the first step are passed over."""
    with_steps = facts.attempts_with_steps
    verdicts = [v for v in facts.verdicts if v.cause != Cause.FAILED or v.attempt in with_steps]
    last = verdicts[-1] if verdicts else None
    if last is None or last.cause not in (Cause.FAILED, Cause.TIME_LIMIT) or last.progress:
        return None
    # Attempts since then that ended without a verdict, on a lost node say, may have come far.
    is_saved = any(number > last.attempt for number in attempts_with_progress(facts.events))
    if is_saved:
        return None
    return _no_progress("two attempts in a row have ended without a newer checkpoint")


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


def never_began(verdict: VerdictGiven, is_alone: bool) -> bool:
    """Tell whether a verdict is `NODE_LOST` before the first step, and blames no node, or the only
    one: with `is_alone` the job has one node, which is blamed each time."""
    is_excused = verdict.bad_nodes and not is_alone
    return verdict.cause == Cause.NODE_LOST and verdict.step is None and not is_excused


def ended_silently(verdict: VerdictGiven) -> bool:
    """Tell whether a verdict is `NODE_LOST` after a step, without progress, and blames no node."""
    is_excused = verdict.progress or verdict.bad_nodes or verdict.step is None
    return verdict.cause == Cause.NODE_LOST and not is_excused
