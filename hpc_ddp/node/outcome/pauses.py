"""The pauses before retries of starts that have failed in a row. Pure: no Slurm, no disk."""

from __future__ import annotations

from hpc_ddp.core.journal.enums import Cause
from hpc_ddp.node.outcome.attempt_facts import AttemptFacts

# Before retries of starts that have failed in a row; Slurm by itself waits for two minutes.
PAUSES_S = 0.0, 600.0, 1800.0
IN_VAIN = (Cause.FAILED, Cause.NODE_LOST, Cause.BAD_NODE)  # causes of a start that has not worked


def pause_before_retry(facts: AttemptFacts, cause: Cause) -> float:
    """Return for how many seconds the next attempt is put off after one that ended with `cause`:
    more and more of `PAUSES_S` where starts in a row have come to nothing, and not by a node's
    fault, in a run of which an earlier start has worked; else 0. Data or a container's image, say,
    may be away for longer. Where an attempt has failed just before, later than its start, the row
    begins with it: an outage may begin amid the training. Raise as `bounds.find_refusal`."""
    worked = facts.worked_attempts
    nodes_to_blame = [*facts.broken_nodes, *facts.lost_nodes, *facts.mute_nodes]
    if cause == Cause.BAD_NODE and facts.unfit:
        nodes_to_blame += facts.unfit.bad_nodes
    if cause not in IN_VAIN or nodes_to_blame or not worked or facts.attempt in worked:
        return 0.0
    count = 1
    for verdict in reversed(facts.verdicts):
        has_worked = verdict.attempt in worked
        count += verdict.cause == Cause.FAILED if has_worked else verdict.cause in IN_VAIN
        if has_worked:
            break
    return PAUSES_S[min(count, len(PAUSES_S)) - 1]
