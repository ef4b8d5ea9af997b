"""The decision after the step of an attempt has ended, and its reason. Pure: no Slurm, no disk.

=============  ==========================================================================
cause          action
=============  ==========================================================================
finished       none
superseded     none: Slurm has requeued the job itself, or a newer attempt runs
cancelled      none, for good
preempted      requeue, without bound unless ``max_requeues`` is given
time limit     the same, while attempts make progress
notice         the same (the job got a signal that asks it to stop, and can continue)
bad node       the same, at most ``max_failures`` times in a row (a preflight has failed)
node lost      the same (a node ended without a word), while workers come to life and,
               where Slurm knows of no lost node, save something new
stood still    the same (a failure right after all stood still, as in a suspension)
unfinished     give up, as failed: the script left its loop and did not call run.finish()
failed         requeue up to ``max_failures`` times where it may help, else give up
=============  ==========================================================================

``max_requeues`` 0 permits no requeue at all. More than three times ``max_failures`` attempts in a
row without a newer checkpoint end a run, whatever their causes; preemptions do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from hpc_ddp.core.errors import EARLY_EXIT, HIDDEN_EXIT
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import END_OF_TIME, Action, Cause, StopReason
from hpc_ddp.core.journal.events import (
    CheckpointRestored,
    Finished,
    FirstStep,
    JournalEvent,
    NoticeGiven,
    PreflightEnded,
    Started,
    Stopped,
    TrainingBegun,
    VerdictGiven,
    WorkerStarted,
)
from hpc_ddp.core.journal.journal import attempts_with_progress, last_event, last_step
from hpc_ddp.node.outcome.first_failure import Failure, early_exits, find_failure, read_failures
from hpc_ddp.node.outcome.silent_ends import (
    ended_silently,
    most_in_a_row,
    never_began,
    silent_nodes,
)
from hpc_ddp.slurm_text import Job

E = TypeVar("E", bound=JournalEvent)
UNFINISHED = f"{EARLY_EXIT}; what came after its last checkpoint is lost"
OUTLASTED = " (the script did not end by itself, and was killed)"
AFTER_STILL = " (right after it stood still, as in a suspension: no failure is counted)"
MAYBE_DONE = " (the script exited with 0 after the notice, so it may have finished)"
NOT_SEEN = "the script saves by itself, if at all, so that its progress can't be seen"
EARLY_S = 600.0  # after its start a plain script's errors may be those of a node, or of a disk
CANCELLED_CODE = 143  # 128 + SIGTERM, as a shell would report it


@dataclass(frozen=True)
class AttemptFacts:
    """The facts on which a verdict is based."""

    spec: JobSpec
    attempt: int
    cancelled: bool  # by the user, through hpc-ddp
    superseded: bool  # a newer attempt of the run has started
    job: Job | None  # Slurm's record of the job now; None without Slurm or without an answer
    restarts: int  # the job's restart count when this attempt started
    nodes: Sequence[str]  # names, in the order of the ranks
    # What tasks wrote of their ends. A record with ``left`` is of a node that was lost and went on
    # in vain, while an elastic job did without it.
    records: Sequence[dict[str, Any]]
    events: Sequence[JournalEvent]  # the run's since its last submit, by attempt and time
    had_begun: bool = False  # a training, before the last submit
    lost_nodes: Sequence[str] = ()  # silent nodes that Slurm says are down or do not answer
    mute_nodes: Sequence[str] = ()  # few silent nodes of many, on which no supervisor began
    gpu_hours: float = 0.0  # of the run, or of all tasks of its array, so far; 0 without a budget
    most_requeues: float = math.inf  # how often the cluster's operators let the run be requeued

    @property
    def bad_nodes(self) -> Sequence[str]:
        """The nodes to blame for this attempt's end: the `lost_nodes`, those that failed the
        preflight, the `broken_nodes` and the `mute_nodes`; each once. Raises as `failure`."""
        unfit = self.unfit.bad_nodes if self.unfit else []
        return [*dict.fromkeys([*self.lost_nodes, *unfit, *self.broken_nodes, *self.mute_nodes])]

    def find_event(self, kind: type[E]) -> E | None:
        """Return this attempt's last event of a kind, None without one."""
        return last_event([e for e in self.events if e.attempt == self.attempt], kind)

    @property
    def verdicts(self) -> list[VerdictGiven]:
        """The verdicts of the earlier attempts, oldest first."""
        earlier = (event for event in self.events if event.attempt < self.attempt)
        return [event for event in earlier if isinstance(event, VerdictGiven)]

    @property
    def is_ours(self) -> bool:
        """Whether the script uses hpc_ddp.training, so that progress is known: an attempt since the
        last submit has done a step, or restored a checkpoint. False for any script before that."""
        return any(isinstance(event, (FirstStep, CheckpointRestored)) for event in self.events)

    @property
    def is_plain(self) -> bool:
        """Whether the journal has nothing of hpc_ddp.training: `is_ours` is False, and in this
        attempt the script has not called `start`."""
        return not (self.is_ours or self.find_event(WorkerStarted))

    @property
    def ends(self) -> Sequence[dict[str, Any]]:
        """The `records` of nodes that were in the job to its end: those without ``left``."""
        return [record for record in self.records if not record.get("left")]

    @property
    def complete(self) -> bool:
        """Whether all tasks of all nodes have recorded their end; an elastic job needs only its
        first node."""
        if self.spec.elastic:
            return any(record["node"] == self.nodes[0] for record in self.ends)
        return not silent_nodes(self.spec, self.nodes, self.records)

    @property
    def has_ended_well(self) -> bool:
        """Whether all tasks of all nodes have recorded their end, and each exit code is 0."""
        return self.complete and not any(record["code"] for record in self.ends)

    @property
    def progress(self) -> bool:
        """Whether this attempt has saved a newer checkpoint than it began with."""
        return self.attempt in attempts_with_progress(self.events)

    @property
    def step(self) -> int | None:
        """The last completed step that the journal has for this attempt, None before the first."""
        return last_step([event for event in self.events if event.attempt == self.attempt])

    @property
    def failure(self) -> Failure | None:
        """The failure by `find_failure`. Raise KeyError or TypeError for a damaged record."""
        return find_failure(self._failures, self.events, self.attempt, self.has_ended_well)

    @property
    def _failures(self) -> list[Failure]:
        """All failures that the records in `ends` have. Raises as `failure`."""
        return [failure for record in self.ends for failure in read_failures(record)]

    @property
    def broken_nodes(self) -> list[str]:
        """The node of `failure`, if that is an error of the machine, and the job has several nodes,
        of which no other has such an error; else []."""
        nodes = {failure.node for failure in self._failures if failure.is_of_machine}
        is_alone = self.failure and nodes == {self.failure.node} and len(self.nodes) > 1
        return [*nodes] if is_alone else []

    @property
    def unfit(self) -> PreflightEnded | None:
        """The preflight of this attempt if it let no training begin, else None."""
        event = self.find_event(PreflightEnded)
        return event if event and not event.ok else None

    @property
    def notices(self) -> list[str]:
        """Why the attempt was asked to stop, [] if it was not: the `StopReason` that the ranks have
        agreed on; then the sources of the notices in `ends`, of the notice that has ended the
        preflight, and of the journal's last notice, if that source is in `END_OF_TIME`."""
        stopped, notice = self.find_event(Stopped), self.find_event(NoticeGiven)
        sources: list[str] = [stopped.reason] if stopped else []
        sources += [record["notice"] for record in self.ends if record.get("notice")]
        sources += [self.unfit.notice] if self.unfit and self.unfit.notice else []
        sources += [notice.source] if notice and notice.source in END_OF_TIME else []
        return sources


@dataclass(frozen=True)
class Verdict:
    """The end of an attempt (`cause`), what follows (`action`), the reason in words, and the exit
    code of the batch script."""

    cause: Cause
    action: Action
    why: str
    exit_code: int = 0


def decide(facts: AttemptFacts) -> Verdict:
    """Return the verdict that follows from the facts: its cause, and for some causes a requeue that
    no bound forbids. Raise KeyError or TypeError for a damaged record."""
    cause = _cause(facts)
    if cause in (Cause.FINISHED, Cause.SUPERSEDED):
        why = f"Slurm has lost {', '.join(facts.lost_nodes)}" if facts.lost_nodes else ""
        return Verdict(cause, Action.NONE, why)
    if cause == Cause.UNFINISHED:
        return Verdict(Cause.FAILED, Action.GIVE_UP, UNFINISHED, 1)
    if cause == Cause.BAD_NODE and facts.unfit and facts.unfit.hopeless:
        return Verdict(Cause.FAILED, Action.GIVE_UP, _describe(facts, cause), 1)
    if cause == Cause.CANCELLED:
        return Verdict(cause, Action.NONE, "by the user", CANCELLED_CODE)
    why_not = _why_not_again(facts, cause)
    if why_not is None:
        return Verdict(cause, Action.REQUEUE, _describe(facts, cause))
    code = facts.failure.exit_code if facts.failure and cause == Cause.FAILED else 1
    return Verdict(cause, Action.GIVE_UP, f"{_describe(facts, cause)}; {why_not}", code)


def _cause(facts: AttemptFacts) -> Cause:
    """Return why the attempt has ended: the first cause that applies, in the order below."""
    job = facts.job
    if facts.superseded or (job and job.restarts > facts.restarts):
        return Cause.SUPERSEDED
    if facts.cancelled or StopReason.CANCELLED in facts.notices:
        return Cause.CANCELLED
    finished, complete = facts.find_event(Finished), facts.complete
    # An idle torchrun was killed after its workers' end; `finished` tells how these have ended.
    codes = [record["code"] for record in facts.ends if not (finished and record.get("idle"))]
    is_good = complete and not any(codes)
    is_through = is_good or (facts.notices and finished and not finished.at_exit)
    # After a notice a later stage of the worker's script may have stopped with 0, or been cut off.
    if finished and is_through and not (finished.within and (facts.notices or not is_good)):
        return Cause.FINISHED
    if job and job.preempted:
        return Cause.PREEMPTED
    if job and (job.reason == "TimeLimit" or job.state == "TIMEOUT"):
        return Cause.TIME_LIMIT
    if job and (job.reason == "NodeDown" or job.state in ("NODE_FAIL", "BOOT_FAIL")):
        return Cause.NODE_LOST
    if job and job.is_cancelled:
        return Cause.CANCELLED
    if set(facts.notices) & {*END_OF_TIME}:
        return Cause.TIME_LIMIT
    if facts.unfit and not facts.unfit.notice:  # the batch script ends a step that waits for it
        return Cause.BAD_NODE
    if facts.notices:
        # A silent node without a stop of the ranks has died: srun then signals the other nodes.
        is_asked = complete or facts.find_event(Stopped) or facts.unfit
        return Cause.NOTICE if is_asked else Cause.NODE_LOST
    if facts.failure and facts.failure.is_of_peers and facts.spec.elastic and facts.lost_nodes:
        return Cause.NODE_LOST
    if facts.failure:
        stood_still = any(record.get("stood_still") for record in facts.ends)
        return Cause.STOOD_STILL if stood_still and facts.failure.is_of_clock else Cause.FAILED
    if not is_good:
        return Cause.NODE_LOST
    # In any attempt: a start that is killed before its loop may end with 0.
    has_begun = facts.had_begun or last_event(facts.events, TrainingBegun)
    if not has_begun or last_event(facts.events, Finished):
        return Cause.FINISHED
    return Cause.UNFINISHED if early_exits(facts.events, facts.attempt) else Cause.FAILED


def _why_not_again(facts: AttemptFacts, cause: Cause) -> str | None:
    """Return the reason why no attempt may follow this one, which ended with `cause`; None where
    one may. The bounds on the whole run come first, then those on attempts in a row."""
    spec = facts.spec
    if over_text := over_budget(spec, facts.gpu_hours) or over_requeues(facts, cause):
        return over_text
    if cause == Cause.FAILED:
        return _why_no_retry(facts)
    if cause == Cause.BAD_NODE:
        row = list(takewhile(lambda v: v.cause == cause, reversed(facts.verdicts)))
        if len(row) >= spec.max_failures:
            return f"the preflights of {len(row) + 1} attempts in a row have failed"
    if cause == Cause.NODE_LOST and facts.step is None:
        # Maybe no node was lost, and nothing can start here: a wrong --python, a full disk.
        row = list(takewhile(never_began, reversed(facts.verdicts)))
        if len(row) >= spec.max_failures and not facts.lost_nodes:
            return f"nothing was heard of the workers in {len(row) + 1} attempts"
    count = _count_without_progress(facts, cause)
    if count > most_in_a_row(spec):
        return f"{count} attempts in a row have ended without a newer checkpoint"
    if cause == Cause.NODE_LOST and facts.is_ours and not (facts.progress or facts.lost_nodes):
        row = list(takewhile(ended_silently, reversed(facts.verdicts)))
        if len(row) >= spec.max_failures:  # killed for want of memory, say, each time
            return f"{len(row) + 1} attempts in a row ended so, without a newer checkpoint"
    return _why_no_more_time(facts) if cause == Cause.TIME_LIMIT else None


def _why_no_more_time(facts: AttemptFacts) -> str | None:
    """Return the reason why no attempt may follow one that ended at its time limit; None where one
    may. A script without hpc_ddp.training may save by itself: with ``max_requeues`` it has no other
    bound."""
    spec = facts.spec
    if facts.is_ours:
        return _no_progress(facts)
    if spec.max_requeues is not None:
        return None
    if facts.find_event(WorkerStarted) and (reason := _no_progress(facts)):
        return f"{reason}, and without a step (--max-requeues allows more)"
    count = 1 + sum(v.cause == Cause.TIME_LIMIT for v in facts.verdicts)
    if count > most_in_a_row(spec) * spec.parts_of_time:
        return f"{NOT_SEEN}; {count} attempts have ended so (--max-requeues allows more)"
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
    """Return the number of attempts in a row, up to this one, that brought no newer checkpoint; 0
    where this one, which ended with `cause`, has saved or is excused: a job may crash its nodes.

    Preemptions, Slurm's own requeues, and time limits of a script without hpc_ddp.training are
    excused: they do not count. They also end the row of such a script, which may have saved.
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


def _why_no_retry(facts: AttemptFacts) -> str | None:
    """Return the reason why no attempt may follow this one, which has failed; None where one may.

    None may follow an error of the script that would come again, as many failures as
    ``max_failures`` permits, or two attempts in a row without a newer checkpoint."""
    failure = facts.failure
    is_broken = bool(facts.broken_nodes)  # the next attempt is kept off the broken node
    is_of_script = failure and failure.kind in ("exception", "exit", "left") and not is_broken
    if is_of_script and not last_event(facts.events, FirstStep):
        if not facts.is_plain:
            return "it came before the first step, and would come again"
        started = facts.find_event(Started)  # steps of a plain script are not known
        if failure and not (started and failure.time > started.time + EARLY_S):
            return f"it came in the first {EARLY_S / 60:.0f} minutes, and would come again"
    if failure and failure.is_of_usage and facts.find_event(FirstStep):  # else it may be the node's
        return "it is an error of the script, and would come again"
    last = facts.verdicts[-1] if facts.verdicts else None
    # A hang is no error of the step: a disk or the network may have stood still.
    error = failure.error if failure and failure.kind not in ("hang", "disk") else ""
    is_same = last and error and (last.error, last.step) == (error, facts.step)
    if is_same and not (facts.is_plain or is_broken):
        return "the same error came at the same step in the attempt before"
    retries = sum(v.cause == Cause.FAILED for v in facts.verdicts)
    if retries >= facts.spec.max_failures:
        were = "retry was" if retries == 1 else "retries were"
        return f"{retries} {were} made already (--max-failures)"
    # With the disk away no checkpoint could be read or written: that shows no lack of progress.
    is_of_disk = failure is not None and failure.kind == "disk"
    return _no_progress(facts) if facts.is_ours and not is_of_disk else None


def _no_progress(facts: AttemptFacts) -> str | None:
    """Return the reason to give up where the last earlier attempt with a verdict had failed, or run
    into its time limit, and saved nothing, and nothing was saved since; None otherwise."""
    last = facts.verdicts[-1] if facts.verdicts else None
    if last is None or last.cause not in (Cause.FAILED, Cause.TIME_LIMIT) or last.progress:
        return None
    # Attempts since then that ended without a verdict, on a lost node say, may have come far.
    is_saved = any(number > last.attempt for number in attempts_with_progress(facts.events))
    return None if is_saved else "two attempts in a row have ended without a newer checkpoint"


def _describe(facts: AttemptFacts, cause: Cause) -> str:
    """Return the end of an attempt with `cause` in words, for the verdict's `why`."""
    if cause == Cause.FAILED and facts.has_ended_well:
        return f"{facts.failure}: {HIDDEN_EXIT}" if facts.failure else HIDDEN_EXIT
    if cause in (Cause.FAILED, Cause.STOOD_STILL):
        return f"{facts.failure}{AFTER_STILL * (cause == Cause.STOOD_STILL)}"
    if facts.unfit and cause == Cause.BAD_NODE:
        return f"preflight: {facts.unfit.why}"
    if cause == Cause.NODE_LOST:
        silent = ", ".join(silent_nodes(facts.spec, facts.nodes, facts.records))
        return f"no word from {silent or 'a node'}"
    is_maybe_done = facts.is_plain and facts.notices and facts.has_ended_well
    is_outlasted = any(r.get("killed") and r["notice"] for r in facts.ends)
    end = MAYBE_DONE if is_maybe_done else OUTLASTED * is_outlasted
    return f"{cause}{end}" if facts.step is None else f"{cause}, at step {facts.step}{end}"
