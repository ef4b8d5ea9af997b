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
bad node       the same, at most ``max_failures`` times in a row (a preflight has failed);
               failed, and given up, where other nodes would fail it as well
node lost      the same (a node ended without a word), while workers come to life and,
               where Slurm knows of no lost node, save something new
stood still    the same (a failure right after all stood still, as in a suspension)
unfinished     give up, as failed: the script left its loop and did not call run.finish()
failed         requeue up to ``max_failures`` times since the newest checkpoint where it may
               help, else give up
=============  ==========================================================================

The bounds are those of `bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_ddp.core.errors import EARLY_EXIT, HIDDEN_EXIT
from hpc_ddp.core.journal.enums import END_OF_TIME, Action, Cause, EndKind, StopReason
from hpc_ddp.core.journal.events import Finished, Stopped, TrainingBegun
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.node.outcome.attempt_facts import AttemptFacts, silent_nodes
from hpc_ddp.node.outcome.bounds import Refusal, find_refusal
from hpc_ddp.node.outcome.first_failure import early_exits
from hpc_ddp.node.outcome.pauses import pause_before_retry

UNFINISHED = f"{EARLY_EXIT}; what came after its last checkpoint is lost"
OUTLASTED = " (the script did not end by itself, and was killed)"
AFTER_STILL = " (right after it stood still, as in a suspension: no failure is counted)"
MAYBE_DONE = " (the script exited with 0 after the notice, so it may have finished)"
CANCELLED_CODE = 143  # 128 + SIGTERM, as a shell would report it


@dataclass(frozen=True)
class Verdict:
    """The end of an attempt (`cause`, `kind`), what follows (`action`), the reason in words, the
    exit code of the batch script, the bound by which the run is given up, and the seconds for which
    the next attempt is put off."""

    cause: Cause
    action: Action
    why: str
    exit_code: int = 0
    kind: EndKind | None = None
    refusal: Refusal | None = None
    pause_s: float = 0.0


def decide(facts: AttemptFacts) -> Verdict:
    """Return the verdict that follows from the facts. Its action is as in the module's table: none,
    a requeue while no bound forbids it (`find_refusal`), or else to give up, with an exit code that
    is not 0. A script that left its loop early is given up in any case. So is a run whose preflight
    would fail on other nodes, too, and of which no start has worked: its cause is then `FAILED`,
    not `BAD_NODE`. Raise KeyError or TypeError for a damaged record."""
    cause = _cause(facts)
    if cause in (Cause.FINISHED, Cause.SUPERSEDED):
        why = f"Slurm has lost {', '.join(facts.lost_nodes)}" if facts.lost_nodes else ""
        return Verdict(cause, Action.NONE, why)
    if cause == Cause.CANCELLED:
        return Verdict(cause, Action.NONE, "by the user", CANCELLED_CODE)
    why, kind = _describe(facts, cause)
    is_hopeless = cause == Cause.BAD_NODE and facts.unfit and facts.unfit.hopeless
    has_hopeless_nodes = is_hopeless and not facts.worked_attempts  # else what it lacks comes back
    if kind == EndKind.EARLY_EXIT or has_hopeless_nodes:
        return Verdict(Cause.FAILED, Action.GIVE_UP, why, 1, kind)
    refusal = find_refusal(facts, cause)
    if refusal is None:
        pause_s = pause_before_retry(facts, cause)
        return Verdict(cause, Action.REQUEUE, why, kind=kind, pause_s=pause_s)
    code = facts.failure.exit_code if facts.failure and cause == Cause.FAILED else 1
    return Verdict(cause, Action.GIVE_UP, f"{why}; {refusal.text}", code, kind, refusal)


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
    is_finished = not has_begun or last_event(facts.events, Finished)
    return Cause.FINISHED if is_finished else Cause.FAILED


def _describe(facts: AttemptFacts, cause: Cause) -> tuple[str, EndKind | None]:
    """Return the end of an attempt with `cause` in words, for the verdict's `why`, and its kind,
    None where the cause says all."""
    if cause == Cause.FAILED and facts.has_ended_well:
        if facts.failure:
            return f"{facts.failure}: {HIDDEN_EXIT}", EndKind.HIDDEN_EXIT
        if early_exits(facts.events, facts.attempt):
            return UNFINISHED, EndKind.EARLY_EXIT
        return HIDDEN_EXIT, EndKind.HIDDEN_EXIT
    if cause in (Cause.FAILED, Cause.STOOD_STILL):
        return f"{facts.failure}{AFTER_STILL * (cause == Cause.STOOD_STILL)}", None
    if facts.unfit and cause == Cause.BAD_NODE:
        return f"preflight: {facts.unfit.why}", EndKind.PREFLIGHT
    if cause == Cause.NODE_LOST:
        silent = ", ".join(silent_nodes(facts.spec, facts.nodes, facts.records))
        return f"no word from {silent or 'a node'}", None
    end = str(cause) if facts.step is None else f"{cause}, at step {facts.step}"
    if facts.is_plain and facts.notices and facts.has_ended_well:
        return end + MAYBE_DONE, EndKind.MAYBE_FINISHED
    if any(record.get("killed") and record["notice"] for record in facts.ends):
        return end + OUTLASTED, EndKind.KILLED
    return end, None
