"""The explanation of a run's end, by its verdict, its first failure, and patterns in its logs.

The texts begin with a verb, as ``was preempted``: their subject, the run or the attempt, is put
before them by the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hpc_ddp.core.accelerators import CPU_ONLY, NO_GPU
from hpc_ddp.core.errors import EARLY_EXIT, ERROR_LINE, HIDDEN_EXIT
from hpc_ddp.core.job.slurm_values import is_unlimited
from hpc_ddp.core.journal.enums import Action, Bound, Cause, EndKind
from hpc_ddp.core.journal.events import FabricChosen, FirstStep, Stopped, Submitted, VerdictGiven
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.report.explain.explanation import (
    Explanation,
    fill_hint,
    log_hint,
    shorten,
    step_phrase,
)
from hpc_ddp.report.explain.facts import RunFacts
from hpc_ddp.report.explain.node_records import RecordedFailure, find_user_line
from hpc_ddp.report.explain.patterns import SIGNALS, Diagnosis, recognise_failure

_HOW_TO_SAVE = "hpc_ddp.training in the script (docs/adopt)"
# The cause of a job without a verdict, by Slurm's last state of it.
_CAUSE_OF_STATE = {
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "NODE_FAIL": Cause.NODE_LOST,
    "BOOT_FAIL": Cause.NODE_LOST,
    "PREEMPTED": Cause.PREEMPTED,
    "CANCELLED": Cause.CANCELLED,
    "OUT_OF_MEMORY": "host out of memory",
}
_BY_CAUSE: dict[str, tuple[str, str]] = {
    Cause.PREEMPTED: ("preempted", "was preempted{at}: a job of higher priority took its nodes."),
    Cause.NOTICE: ("stopped", "was asked to stop{at}, and did."),
    Cause.CANCELLED: ("cancelled", "was cancelled{at}."),
    Cause.STOOD_STILL: ("stopped", "failed{at}, right after it stood still, as in a suspension."),
}
# Kinds of failures that come again in the next attempt. The logs are searched for them where no
# rank has recorded a failure.
REPEATING_KINDS = (
    "bad environment",
    "host out of memory",
    "disk full",
    "disk read-only",
    "disk failed",
)
# Kinds whose text has the reason already why the run was given up.
_EXPLAINED_KINDS = ("no progress", "unfinished", "budget spent")


def explain_end(facts: RunFacts) -> Explanation:
    """Explain a run that does not go on by itself, by its cancelling, or by the end of its newest
    attempt. The text also says that the run can go on, where it can, or why it was given up."""
    verdict = facts.verdict
    if facts.cancelled and verdict is None:
        place = " before it began" if facts.newest is None else step_phrase(facts)
        return Explanation("cancelled", f"was cancelled{place}.", facts.again)
    end = explain_attempt(facts)
    is_requeued = verdict is not None and verdict.action == Action.REQUEUE
    # In the queue, by scancel: the run's own mark is then missing.
    was_dropped = is_requeued and facts.record is not None and facts.record.state == "CANCELLED"
    is_cancelled = (facts.cancelled or was_dropped) and not _is_given_up(facts)
    if is_cancelled and end.kind != "cancelled":
        text = f"was cancelled. Its last attempt {end.text}"
        return replace(end, kind="cancelled", text=text, hint=facts.again)
    if is_requeued and facts.record is None and facts.refusal and not facts.is_forgotten:
        text = f"{end.text} It was to be requeued; of job {facts.job_id}: {facts.refusal}."
        return replace(end, text=text, hint="the same command again, once Slurm answers")
    if is_requeued:
        text = f"{end.text} It can go on, but was not requeued."
        return replace(end, text=text, hint=facts.again)
    has_reason = end.kind in _EXPLAINED_KINDS or _has_fault_on_all_nodes(verdict)
    if verdict and verdict.action == Action.GIVE_UP and not has_reason:
        end = replace(end, text=f"{end.text} It was given up: {verdict.why_not or verdict.why}.")
    return end


def _is_given_up(facts: RunFacts) -> bool:
    """Return whether the run has been given up, and was not submitted again."""
    last = last_event(facts.events, Submitted, VerdictGiven)
    return isinstance(last, VerdictGiven) and last.action == Action.GIVE_UP


def _has_fault_on_all_nodes(verdict: VerdictGiven | None) -> bool:
    """Return whether a verdict is that of a preflight which has found a fault that all nodes have:
    its cause is then ``failed``, and not that of a bad node. False for None."""
    if verdict is None:
        return False
    return verdict.cause == Cause.FAILED and verdict.kind == EndKind.PREFLIGHT


def explain_attempt(facts: RunFacts) -> Explanation:
    """Explain the end of the newest attempt, or of a job that had no attempt: by its verdict, else
    by the stop that a standalone script has journaled, else by Slurm's last state of the job."""
    verdict = facts.verdict
    if verdict:
        return _explain_verdict(facts, verdict)
    stopped = last_event(facts.select(Stopped, attempt=facts.newest), Stopped)
    if facts.standalone and stopped and not facts.failure:
        source = f" ({stopped.source})" if stopped.source else ""
        text = f"was asked to stop{step_phrase(facts)}{source}, and did."
        return Explanation("stopped", text, facts.again)
    state = facts.record.state if facts.record else ""
    return _explain_cause(facts, _CAUSE_OF_STATE.get(state, ""))


def _explain_verdict(facts: RunFacts, verdict: VerdictGiven) -> Explanation:
    """Explain the end of an attempt by its verdict: by the bound, the kind of the end, or the
    cause."""
    if verdict.bound == Bound.NO_PROGRESS:
        return _explain_no_progress(facts, verdict)
    if verdict.cause == Cause.BAD_NODE or _has_fault_on_all_nodes(verdict):
        return _explain_unfit_nodes(facts, verdict)
    if verdict.cause == Cause.BUDGET:
        text = f"was not started again: {verdict.why}."
        return Explanation("budget spent", text, f"{facts.again} --budget-gpu-hours HOURS")
    if verdict.kind == EndKind.HIDDEN_EXIT and verdict.node is None:
        hint = "what ended it may stand in its log; in a shell, set -o pipefail, or exec before the"
        hint += f" program; then {facts.again}"
        return Explanation("exit code", f"ended{step_phrase(facts)} with {HIDDEN_EXIT}.", hint)
    if verdict.kind == EndKind.EARLY_EXIT:
        text = f"left its training loop, but {EARLY_EXIT}."
        hint = f"call run.finish() at its end; then {facts.with_new_code}"
        return Explanation("unfinished", text, hint)
    return _explain_cause(facts, verdict.cause)


def _explain_cause(facts: RunFacts, cause: str) -> Explanation:
    """Explain the end of the newest attempt by its `cause`: a `Cause`, ``host out of memory``, or
    '' for an unknown one. For ``failed``, ``host out of memory`` and '' it is explained by the
    recorded failure of a rank or of torchrun, where there is one."""
    if facts.failure and cause in (Cause.FAILED, "", "host out of memory"):
        return _explain_failure(facts, facts.failure)
    if cause == Cause.TIME_LIMIT:
        return _explain_time_limit(facts)
    if cause in _BY_CAUSE:
        kind, words = _BY_CAUSE[cause]
        if _was_killed_after_notice(facts):
            words = words.replace(", and did.", ", did not, and was killed.")
        return Explanation(kind, words.format(at=step_phrase(facts)), facts.again)
    return _explain_without_failure(facts, cause)


def _explain_unfit_nodes(facts: RunFacts, verdict: VerdictGiven) -> Explanation:
    """Explain an attempt that its preflight has ended: by the bad nodes, or by a fault that all
    nodes have. If this fault is a known failure, the explanation has that failure's kind and hint.
    """
    why = _end_in_reason(verdict).removeprefix("preflight: ")
    kind, hint = "bad node", facts.again
    if _has_fault_on_all_nodes(verdict):
        diagnosis = recognise_failure(why.removesuffix(" (the same on all nodes)"))
        if diagnosis:
            kind, hint = diagnosis.kind, fill_hint(facts, diagnosis.hint, diagnosis.groups)
    return Explanation(kind, f"began no training, since its preflight failed: {why}.", hint)


def _explain_time_limit(facts: RunFacts) -> Explanation:
    """Explain an end by the time limit. Where the run was given up since its script reports no
    steps (`Bound.UNSEEN_PROGRESS`), the hint has two ways to go on: more requeues, if the script
    saves by itself, or hpc_ddp.training. Else the hint is the command that goes on."""
    limit = facts.spec.get("time")
    limit = f"{limit} min" if str(limit).isdigit() else limit
    if facts.spec.get("time_min") or is_unlimited(str(limit)):
        limit = None  # Slurm has chosen a limit between time_min and time, or the partition's
    text = f"ran into its time limit{f' of {limit}' if limit else ''}{step_phrase(facts)}."
    if _was_killed_after_notice(facts):
        text += " It did not end by itself, and was killed."
    if facts.verdict and facts.verdict.bound == Bound.UNSEEN_PROGRESS:
        text += " It reports no step, so that its progress can't be seen."
        by_itself = f"{facts.again} --max-requeues 100, if it goes on by itself"
        return Explanation("time limit", text, f"{by_itself}; else save: {_HOW_TO_SAVE}")
    return Explanation("time limit", text, facts.again)


def _was_killed_after_notice(facts: RunFacts) -> bool:
    """Return whether the newest attempt's script did not end after a notice, and was killed."""
    return facts.verdict is not None and facts.verdict.kind == EndKind.KILLED


def _end_in_reason(verdict: VerdictGiven) -> str:
    """Return the part of a verdict's reason on how the attempt ended."""
    return verdict.why.removesuffix(f"; {verdict.why_not}")


def _explain_no_progress(facts: RunFacts, verdict: VerdictGiven) -> Explanation:
    """Explain a run that was given up after attempts in a row without a newer checkpoint: by their
    number, and by the end of the last one. After a time limit, a notice or a failure the hint is to
    save more often."""
    if verdict.cause == Cause.BAD_NODE:
        last = _explain_unfit_nodes(facts, verdict)
    else:
        last = _explain_cause(facts, verdict.cause)
    # The text counts the attempts that "ended so": so as the part before it, which comes later.
    count = (verdict.why_not or "").replace(" ended so,", " have ended")
    hint = last.hint
    if verdict.cause == Cause.TIME_LIMIT:
        hint = f"save more often, start(save_every=…), or more --time; then {facts.with_new_code}"
    elif verdict.cause == Cause.FAILED:
        hint += "; a run that saves more often gets further: --env HPC_DDP_SAVE_EVERY=60"
    elif verdict.cause == Cause.NOTICE:
        hint = f"save more often, start(save_every=…); then {facts.with_new_code}"
    text = f"was given up: {count}. The last one {last.text}"
    return replace(last, kind="no progress", text=text, hint=hint)


def _explain_failure(facts: RunFacts, failure: RecordedFailure) -> Explanation:
    """Explain a failure of a rank, or of torchrun itself. The hint is `CPU_ONLY` where a run on
    this machine lacks a GPU."""
    kind, text, hint = _describe_failure(facts, failure)
    if facts.spec.get("backend") == "local" and NO_GPU.search(failure.error):
        hint = CPU_ONLY
    return Explanation(kind, text, hint, node=failure.node or None, rank=failure.rank)


def _describe_failure(facts: RunFacts, failure: RecordedFailure) -> tuple[str, str, str]:
    """Return kind, text and hint of a failure, by the first of these that applies:

    - its error is an error line of the script's own (`ERROR_LINE`);
    - its error, or without an error the end of its log, has a known pattern;
    - the rank's log has an error line of the script's own;
    - the rank left its training early; it has another error; a signal; an exit code.
    """
    process = "torchrun" if failure.rank is None else f"rank {failure.rank}"
    process += f" on {failure.node}" if failure.node else ""
    logs = fill_hint(facts, "{logs}", {}, failure.rank)
    at, error = step_phrase(facts), failure.error
    log = facts.agent_log if failure.rank is None else facts.rank_log
    own_line = ERROR_LINE.match(error)  # first: its words may be those of a known failure
    diagnosis = None if own_line else recognise_failure(error or log[-8000:])
    if diagnosis:
        return _describe_known(facts, failure, diagnosis, process)
    line = own_line or ERROR_LINE.search(facts.rank_log)
    # A line in the log counts only if it is that of the recorded error.
    if line and (not error or line["text"][:60] in error):
        return "script error", f"failed{at}: {process} said: {line['text']}.", line["hint"] or logs
    if error.startswith(EARLY_EXIT):
        hint = "all ranks leave the loop at the same step, then call run.finish(); then"
        text = f"failed{at}: {process} left the training: {error}."
        return "early exit", text, f"{hint} {facts.with_new_code}"
    if error:
        # Of the last traceback in the log.
        place = find_user_line(facts.rank_log.rpartition("Traceback (most recent call last)")[2])
        text = f"failed{at}: {process} raised {shorten(error)}{place and f', in {place}'}."
        return "python error", text, f"fix it, then {facts.with_new_code}"
    if failure.code < 0:
        signal = SIGNALS.get(-failure.code, f"it was ended by signal {-failure.code}")
        return "killed", f"failed{at}: {process} died; {signal}.", logs
    text = f"failed{at}: {process} ended with exit code {failure.code}."
    return "exit code", text + _last_line_sentence(facts.rank_log), logs


def _describe_known(
    facts: RunFacts, failure: RecordedFailure, diagnosis: Diagnosis, process: str
) -> tuple[str, str, str]:
    """Return kind, text and hint of a failure with a known pattern, the `diagnosis`.

    `process` is the name of the failed rank, or of torchrun, for the text. Where a collective
    waited for ranks that printed nothing and were then ended, the hint has the log of the first of
    these ranks.
    """
    rank = failure.rank
    if diagnosis.kind == "hang":
        text = f"hung ({process}): {diagnosis.words}.{_hang_sentence(facts)}"
    else:
        text = f"failed{step_phrase(facts)} ({process}): {diagnosis.words}."
        if failure.error and "by the kernel" not in failure.error:
            text += f' It said: "{shorten(failure.error)}".'
    if "waited" in diagnosis.words and facts.terminated:
        text += f" Until then {_ranks_text(facts.terminated)} had said nothing."
        rank = facts.terminated[0]
    if diagnosis.kind in ("communication", "hang"):
        text += _fabric_sentence(facts)
    return diagnosis.kind, text, fill_hint(facts, diagnosis.hint, diagnosis.groups, rank)


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks, one or more, as text: ``rank 3``, ``ranks 0, 1``. The ninth and later ones
    become ``and others``."""
    numbers = ", ".join(map(str, ranks[:8])) + (" and others" if ranks[8:] else "")
    return f"{'ranks' if ranks[1:] else 'rank'} {numbers}"


def _hang_sentence(facts: RunFacts) -> str:
    """Return a sentence on the lines of code at which the ranks stood in a hang, of four lines at
    most, with a blank before it; '' where no rank has recorded its line."""
    ranks_at: dict[str, list[int]] = {}
    for rank, place in sorted(facts.hang_places.items()):
        ranks_at.setdefault(place, []).append(rank)
    places = [f"{_ranks_text(ranks)} at {place}" for place, ranks in ranks_at.items()]
    return f" There stood {'; '.join(places[:4])}." if places else ""


def _fabric_sentence(facts: RunFacts) -> str:
    """Return a sentence, with a blank before it, on the nodes of the newest attempt that have
    another interconnect than most, the first three by name; '' without any. NCCL needs the same
    interconnect on all nodes."""
    events = facts.select(FabricChosen, attempt=facts.newest)
    fabric_of = {event.node: event.name for event in events}
    if len(set(fabric_of.values())) < 2:
        return ""
    usual_name = Counter(filter(None, fabric_of.values())).most_common(1)[0][0]
    odd_nodes = [
        f"{node} ({name or 'none'})" for node, name in fabric_of.items() if name != usual_name
    ]
    more = f" and {len(odd_nodes) - 3} more" if odd_nodes[3:] else ""
    return f" The interconnect was {usual_name}, but not on {', '.join(odd_nodes[:3])}{more}."


def _explain_without_failure(facts: RunFacts, cause: str) -> Explanation:
    """Explain an end for which no rank has recorded a failure, by the first of these that applies:
    a failure of `REPEATING_KINDS` in the job's or torchrun's output; the `cause` (as in
    `_explain_cause`); Slurm's record."""
    record, at = facts.record, step_phrase(facts)
    log = _output_of_last_attempt(facts)
    diagnosis = recognise_failure(log) or recognise_failure(facts.agent_log)
    if diagnosis and diagnosis.kind in REPEATING_KINDS:
        has_stepped = facts.select(FirstStep, attempt=facts.newest)
        begin = f"ended{at}" if has_stepped else "did not come to life"
        hint = fill_hint(facts, diagnosis.hint, diagnosis.groups)
        return Explanation(diagnosis.kind, f"{begin}: {diagnosis.words}.", hint)
    if cause == "host out of memory":
        text = f"ended{at}: Slurm says that it used more memory than it may."
        return Explanation(cause, text, "more --mem, or fewer DataLoader workers")
    logs = f"{log_hint(facts)}; then {facts.again}"
    if cause in (Cause.NODE_LOST, Cause.SUPERSEDED):
        verdict = facts.verdict
        if verdict and verdict.cause == Cause.SUPERSEDED and not verdict.bad_nodes:
            text = f"was requeued{at}, by Slurm or with scontrol requeue."
            return Explanation("stopped", text, facts.again)
        end = _end_in_reason(verdict) if verdict else ""
        text = f"lost a node{at} ({end or 'so Slurm says'})."
        is_given_up = verdict is not None and verdict.action == Action.GIVE_UP
        return Explanation("node lost", text, logs if is_given_up else facts.again)
    if record and record.exit_code.endswith(":53"):  # Slurm's for a job that it could not begin
        text = "never began: on the node Slurm could not open its output file or enter its folder."
        hint = "put the runs on a disk that the nodes see: --runs-dir"
        return Explanation("bad environment", text, hint)
    if record:
        state = f" Slurm's word for job {facts.job_id} is {record.state} ({record.exit_code})."
    else:
        state = f" Of job {facts.job_id}: {facts.refusal}." if facts.refusal else ""
    begin = "ended" if facts.newest is not None else "never began"
    text = f"{begin}{at}, for an unknown reason.{state}{_last_line_sentence(log)}"
    return Explanation("lost", text, logs)


def _output_of_last_attempt(facts: RunFacts) -> str:
    """Return the job's output behind the line with the verdict on the attempt before the newest;
    all of the output where this line is not in it."""
    verdict_line = f"hpc-ddp: attempt {(facts.newest or 0) - 1}: "
    _, separator, after = facts.job_log.rpartition(verdict_line)
    return after.partition("\n")[2] if separator else facts.job_log


def _last_line_sentence(log: str) -> str:
    """Return a sentence with the last line of a log that is not blank, and a blank before it; ''
    without one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f' The last line of its output: "{shorten(lines[-1])}".' if lines else ""
