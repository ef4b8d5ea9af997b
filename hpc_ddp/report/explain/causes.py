"""The end of a run: its verdict, its first failure, and the patterns in its logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hpc_ddp.core.accelerators import CPU_ONLY, NO_GPU
from hpc_ddp.core.errors import EARLY_EXIT, ERROR_LINE
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.journal.events import FabricChosen, FirstStep, Stopped, Submitted, VerdictGiven
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.report.explain.explanation import Explanation, at_step, fill_hint, log_hint, shorten
from hpc_ddp.report.explain.facts import RunFacts
from hpc_ddp.report.explain.node_records import RecordedFailure, place_in
from hpc_ddp.report.explain.patterns import SIGNALS, Diagnosis, recognise

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
# Kinds whose text says already that the run was given up.
_GIVEN_UP = ("no progress", "unfinished", "budget spent")


def explain_end(facts: RunFacts) -> Explanation:
    """Explain a run that does not go on by itself, by the end of its newest attempt, or by its
    cancelling. The text continues a sentence whose subject is the run; it also says that the run
    can go on, where it can, or why it was given up."""
    verdict = facts.verdict
    if facts.cancelled and verdict is None:
        place = " before it began" if facts.newest is None else at_step(facts)
        return Explanation("cancelled", f"was cancelled{place}.", facts.again)
    end = explain_attempt(facts)
    can_go_on = verdict is not None and verdict.action == Action.REQUEUE
    in_queue = can_go_on and facts.record is not None and facts.record.state == "CANCELLED"
    if end.kind != "cancelled" and (facts.cancelled or in_queue) and not _was_given_up(facts):
        text = f"was cancelled. Its last attempt {end.text}"
        return replace(end, kind="cancelled", text=text, hint=facts.again)
    is_asked_in_vain = facts.record is None and facts.refusal and not facts.is_forgotten
    if can_go_on and is_asked_in_vain:
        text = f"{end.text} It was to be requeued; of job {facts.job_id}: {facts.refusal}."
        return replace(end, text=text, hint="the same command again, once Slurm answers")
    if can_go_on:
        text = f"{end.text} It can go on, but was not requeued."
        return replace(end, text=text, hint=facts.again)
    is_explained = end.kind in _GIVEN_UP or _is_same_on_all_nodes(verdict)
    if verdict and verdict.action == Action.GIVE_UP and not is_explained:
        why = verdict.why.rpartition("; ")[2]
        end = replace(end, text=f"{end.text} It was given up: {why}.")
    return end


def _was_given_up(facts: RunFacts) -> bool:
    """Return whether the run has been given up, and was not submitted again."""
    last = last_event(facts.events, Submitted, VerdictGiven)
    return isinstance(last, VerdictGiven) and last.action == Action.GIVE_UP


def _is_same_on_all_nodes(verdict: VerdictGiven | None) -> bool:
    """Return whether a preflight has found a fault that all nodes have: its verdict has then the
    cause failed, and not that of a bad node. False for None."""
    if verdict is None:
        return False
    return verdict.cause == Cause.FAILED and verdict.why.startswith("preflight: ")


def explain_attempt(facts: RunFacts) -> Explanation:
    """Explain the end of the newest attempt, or of a job that had no attempt: by its verdict, else
    by the stop that a standalone script has journaled, else by Slurm's last state of the job. The
    text continues a sentence whose subject is the attempt."""
    verdict = facts.verdict
    if verdict:
        return _explain_verdict(facts, verdict)
    stopped = last_event(facts.select(Stopped, attempt=facts.newest), Stopped)
    if facts.standalone and stopped and not facts.failure:
        source = f" ({stopped.source})" if stopped.source else ""
        text = f"was asked to stop{at_step(facts)}{source}, and did."
        return Explanation("stopped", text, facts.again)
    state = facts.record.state if facts.record else ""
    return _explain_cause(facts, _CAUSE_OF_STATE.get(state, ""))


def _explain_verdict(facts: RunFacts, verdict: VerdictGiven) -> Explanation:
    """Explain the end of an attempt by its verdict: by words in the verdict's reason, else by its
    cause.

    A script that ended without run.finish() has a verdict FAILED without a node. Each other failure
    names its node, except a fault of all nodes in a preflight, which is looked for before.
    """
    if "without a newer checkpoint" in verdict.why:
        return _explain_no_progress(facts, verdict)
    if verdict.cause == Cause.BAD_NODE or _is_same_on_all_nodes(verdict):
        return _explain_unfit_nodes(facts, verdict)
    if verdict.cause == Cause.BUDGET:
        text = f"was not started again: {verdict.why}."
        return Explanation("budget spent", text, f"{facts.again} --budget-gpu-hours HOURS")
    if verdict.cause == Cause.FAILED and verdict.node is None:
        text = f"left its training loop, but {EARLY_EXIT}."
        hint = f"call run.finish() at its end; then {facts.with_new_code}"
        return Explanation("unfinished", text, hint)
    return _explain_cause(facts, verdict.cause)


def _explain_cause(facts: RunFacts, cause: str) -> Explanation:
    """Explain the end of the newest attempt by its cause: a `Cause`, ``host out of memory``, or ''
    for an unknown one. For ``failed``, ``host out of memory`` and '' a recorded failure of a rank
    or of torchrun is the explanation, where there is one."""
    if facts.failure and cause in (Cause.FAILED, "", "host out of memory"):
        return _explain_failure(facts, facts.failure)
    if cause == Cause.TIME_LIMIT:
        return _explain_time_limit(facts)
    if cause in _BY_CAUSE:
        kind, words = _BY_CAUSE[cause]
        if _was_killed_after_notice(facts):
            words = words.replace(", and did.", ", did not, and was killed.")
        return Explanation(kind, words.format(at=at_step(facts)), facts.again)
    return _explain_without_failure(facts, cause)


def _explain_unfit_nodes(facts: RunFacts, verdict: VerdictGiven) -> Explanation:
    """Explain an attempt that its preflight has ended: by the bad nodes, or by a fault that all
    nodes have. If that fault is a known failure, kind and hint are those of the known failure."""
    why = verdict.why.removeprefix("preflight: ")
    kind, hint = "bad node", facts.again
    if _is_same_on_all_nodes(verdict):
        diagnosis = recognise(why.removesuffix(" (the same on all nodes)"))
        if diagnosis:
            kind, hint = diagnosis.kind, fill_hint(facts, diagnosis.hint, diagnosis.groups)
    else:
        why = _reason_of_end(verdict).removeprefix("preflight: ")
    return Explanation(kind, f"began no training, since its preflight failed: {why}.", hint)


def _explain_time_limit(facts: RunFacts) -> Explanation:
    """Explain an end by the time limit. For a script that reports no steps, the hint has two ways
    to go on: more requeues, if the script saves by itself, or hpc_ddp.training."""
    limit = facts.spec.get("time")
    limit = f"{limit} min" if str(limit).isdigit() else limit
    if facts.spec.get("time_min"):
        limit = None  # Slurm gave any limit between the two
    text = f"ran into its time limit{f' of {limit}' if limit else ''}{at_step(facts)}."
    if _was_killed_after_notice(facts):
        text += " It did not end by itself, and was killed."
    if facts.verdict and "its progress can't be seen" in facts.verdict.why:
        text += " It reports no step, so that its progress can't be seen."
        by_itself = f"{facts.again} --max-requeues 100, if it goes on by itself"
        return Explanation("time limit", text, f"{by_itself}; else save: {_HOW_TO_SAVE}")
    return Explanation("time limit", text, facts.again)


def _was_killed_after_notice(facts: RunFacts) -> bool:
    """Return whether the newest attempt's script did not end after a notice, and was killed."""
    return facts.verdict is not None and "and was killed)" in facts.verdict.why


def _reason_of_end(verdict: VerdictGiven) -> str:
    """Return how the attempt ended, from the verdict's reason. For a run that was given up the last
    part of the reason, behind a ``;``, says why it was, and is left out."""
    if verdict.action != Action.GIVE_UP or "; " not in verdict.why:
        return verdict.why
    return verdict.why.rpartition("; ")[0]


def _explain_no_progress(facts: RunFacts, verdict: VerdictGiven) -> Explanation:
    """Explain a run that was given up after attempts in a row without a newer checkpoint.

    The last part of the verdict's reason, behind a ``;``, counts these attempts. The rest of the
    explanation is that of the last attempt's end, with the hint to save more often after a time
    limit, a notice or a failure.
    """
    if verdict.cause == Cause.BAD_NODE:
        last = _explain_unfit_nodes(facts, verdict)
    else:
        last = _explain_cause(facts, verdict.cause)
    # 'ended so' follows the end in the verdict; here the end comes behind it.
    count = verdict.why.rpartition("; ")[2].replace(" ended so,", " have ended")
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
    """Return kind, text and hint of a failure, by the first of these that applies: its error is an
    error line of the script's own (`ERROR_LINE`); its error, or without an error the end of its
    log, has a known pattern; the rank's log has an error line of the script's own; the rank left
    its training early; another error; a signal; an exit code."""
    process = "torchrun" if failure.rank is None else f"rank {failure.rank}"
    process += f" on {failure.node}" if failure.node else ""
    logs = fill_hint(facts, "{logs}", {}, failure.rank)
    at, error = at_step(facts), failure.error
    # The cause of a death without an error is in the end of the log.
    log = facts.agent_log if failure.rank is None else facts.rank_log
    refused = ERROR_LINE.match(error)  # its words may be those of a known failure
    diagnosis = None if refused else recognise(error or log[-8000:])
    if diagnosis:
        return _describe_known(facts, failure, diagnosis, process)
    line = refused or ERROR_LINE.search(facts.rank_log)
    if line and (not error or line["text"][:60] in error):
        return "script error", f"failed{at}: {process} said: {line['text']}.", line["hint"] or logs
    if error.startswith(EARLY_EXIT):
        hint = "all ranks leave the loop at the same step, then call run.finish(); then"
        text = f"failed{at}: {process} left the training: {error}."
        return "early exit", text, f"{hint} {facts.with_new_code}"
    if error:
        place = place_in(facts.rank_log.rpartition("Traceback (most recent call last)")[2])
        text = f"failed{at}: {process} raised {shorten(error)}{place and f', in {place}'}."
        return "python error", text, f"fix it, then {facts.with_new_code}"
    if failure.code < 0:
        signal = SIGNALS.get(-failure.code, f"it was ended by signal {-failure.code}")
        return "killed", f"failed{at}: {process} died; {signal}.", logs
    text = f"failed{at}: {process} ended with exit code {failure.code}."
    return "exit code", text + _last_line(facts.rank_log), logs


def _describe_known(
    facts: RunFacts, failure: RecordedFailure, diagnosis: Diagnosis, process: str
) -> tuple[str, str, str]:
    """Return kind, text and hint of a failure with a known pattern, the `diagnosis`.

    `process` names the failed rank or torchrun in the text. Where a collective waited for ranks
    that said nothing and were then ended, the hint names the log of the first of these ranks.
    """
    rank = failure.rank
    if diagnosis.kind == "hang":
        text = f"hung ({process}): {diagnosis.words}.{_hang_places(facts)}"
    else:
        text = f"failed{at_step(facts)} ({process}): {diagnosis.words}."
        if failure.error and "by the kernel" not in failure.error:
            text += f' It said: "{shorten(failure.error)}".'
    if "waited" in diagnosis.words and facts.terminated:
        text += f" Until then {_ranks(facts.terminated)} had said nothing."
        rank = facts.terminated[0]
    if diagnosis.kind in ("communication", "hang"):
        text += _odd_fabrics(facts)
    return diagnosis.kind, text, fill_hint(facts, diagnosis.hint, diagnosis.groups, rank)


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks, one or more, in words, ``rank 3`` or ``ranks 0, 1``; behind the eighth ``and
    others``."""
    numbers = ", ".join(map(str, ranks[:8])) + (" and others" if ranks[8:] else "")
    return f"{'ranks' if ranks[1:] else 'rank'} {numbers}"


def _hang_places(facts: RunFacts) -> str:
    """Return a sentence on the lines of code at which the ranks stood as they hung, four at most;
    '' where no rank recorded its line."""
    ranks_at: dict[str, list[int]] = {}
    for rank, place in sorted(facts.hang_places.items()):
        ranks_at.setdefault(place, []).append(rank)
    places = [f"{_ranks(ranks)} at {place}" for place, ranks in ranks_at.items()]
    return f" There stood {'; '.join(places[:4])}." if places else ""


def _odd_fabrics(facts: RunFacts) -> str:
    """Return a sentence on the nodes of the newest attempt with another interconnect than most, the
    first three by name; '' without any. NCCL needs the same on all."""
    events = facts.select(FabricChosen, attempt=facts.newest)
    fabric_of = {event.node: event.name for event in events}
    if len(set(fabric_of.values())) < 2:
        return ""
    usual = Counter(filter(None, fabric_of.values())).most_common(1)[0][0]
    odd = [f"{node} ({name or 'none'})" for node, name in fabric_of.items() if name != usual]
    more = f" and {len(odd) - 3} more" if odd[3:] else ""
    return f" The interconnect was {usual}, but not on {', '.join(odd[:3])}{more}."


def _explain_without_failure(facts: RunFacts, cause: str) -> Explanation:
    """Explain an end for which no rank has recorded a failure, by the first of these that applies:
    a failure of `REPEATING_KINDS` in the job's or torchrun's output, the `cause`, Slurm's record.

    `cause` is a `Cause` or ``host out of memory``; '' for an unknown one.
    """
    record, at = facts.record, at_step(facts)
    log = _last_attempts_output(facts)
    diagnosis = recognise(log) or recognise(facts.agent_log)
    if diagnosis and diagnosis.kind in REPEATING_KINDS:
        stepped = facts.select(FirstStep, attempt=facts.newest)
        begin = f"ended{at}" if stepped else "did not come to life"
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
        end = _reason_of_end(verdict) if verdict else ""
        text = f"lost a node{at} ({end or 'so Slurm says'})."
        is_given_up = verdict is not None and verdict.action == Action.GIVE_UP
        return Explanation("node lost", text, logs if is_given_up else facts.again)
    if record and record.exit_code.endswith(":53"):
        text = "never began: on the node Slurm could not open its output file or enter its folder."
        hint = "put the runs on a disk that the nodes see: --runs-dir"
        return Explanation("bad environment", text, hint)
    if record:
        state = f" Slurm's word for job {facts.job_id} is {record.state} ({record.exit_code})."
    else:
        state = f" Of job {facts.job_id}: {facts.refusal}." if facts.refusal else ""
    begin = "ended" if facts.newest is not None else "never began"
    text = f"{begin}{at}, for an unknown reason.{state}{_last_line(log)}"
    return Explanation("lost", text, logs)


def _last_attempts_output(facts: RunFacts) -> str:
    """Return the job's output behind the verdict on the attempt before the newest; all of the
    output where that verdict is not in it."""
    before = f"hpc-ddp: attempt {(facts.newest or 0) - 1}: "
    _, is_there, after = facts.job_log.rpartition(before)
    return after.partition("\n")[2] if is_there else facts.job_log


def _last_line(log: str) -> str:
    """Return a sentence with the last line of a log that is not blank; '' without one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f' The last line of its output: "{shorten(lines[-1])}".' if lines else ""
