"""The explanation of a run in one paragraph: events, place, cause, lost steps, and a hint.

It is made from the facts that `hpc_ddp.report.explain.facts` gathers; read from disk are only the
trials of a sweep, in its job.json.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from hpc_ddp.core.console.units import duration, plural
from hpc_ddp.core.job.task_folder import trial_text
from hpc_ddp.core.journal import goodput
from hpc_ddp.core.journal.enums import Action, Cause, EndKind
from hpc_ddp.core.journal.events import (
    CheckpointSaved,
    Finished,
    FirstStep,
    JournalEvent,
    MetricsLine,
    Queued,
    RankFailed,
    Rerun,
    SaveFailed,
    Started,
    Stopped,
    Submitted,
    TrainingBegun,
    VerdictGiven,
    WorkerStarted,
    step_of,
)
from hpc_ddp.core.journal.journal import is_finished, last_event, last_step
from hpc_ddp.core.journal.stragglers import slow_rank
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.explain.causes import REPEATING_KINDS, explain_attempt, explain_end
from hpc_ddp.report.explain.explanation import Explanation, fill_hint, quoted_path, shorten
from hpc_ddp.report.explain.facts import RunFacts, gather
from hpc_ddp.report.explain.patterns import explain_pending, recognise_failure
from hpc_ddp.report.status.run_state import RunState

SLOW_IMPORTS_S = 15.0  # imports from a warm cache take some three
QUIET_S = 600.0  # a running job without an event for so long may hang
MOST_TRIALS = 8  # of a sweep, with their names
_USUAL_REASONS = ("Priority", "Resources")  # the job only has to wait its turn
# Hints that start nothing of the run. Other hints may have a command from the run's folder or logs:
# they are given only where the user may start something of the run.
_HARMLESS_HINT = re.compile(
    r"(wait|hpc-ddp (logs|explain)|python -[PI] -m hpc_ddp\.training\.export)\b[^;|&`$]*"
)
_LIVE_KINDS = ("waiting", "running", "suspended", "ending")


def explain_run(run: RunFolder) -> Explanation:
    """Read all facts of a run, query Slurm, and return the explanation. Facts that can't be read,
    or that Slurm does not answer, count as missing; nothing is raised."""
    return explain(gather(run))


def explain(facts: RunFacts) -> Explanation:
    """Return the explanation of a run by its facts, as sentences that begin with the run's name.

    The first of these cases that applies decides: an array, unreadable, finished, over for good,
    live, rendered only, ended. Where the user may start nothing of the run, a hint that would start
    something is replaced, or left out while the run is live.
    """
    explanation = _explain_state(facts)
    if explanation.kind in ("waiting", "ending") and facts.newest is not None:
        explanation = _add_last_attempt(facts, explanation)
    lost_steps, lost_s = _count_lost(facts)
    explanation = replace(
        explanation,
        job_id=facts.job_id,
        attempt=facts.newest,
        step=last_step(facts.events),
        lost_steps=lost_steps,
        lost_s=lost_s,
    )
    text = [f"{_run_title(facts.path)} {explanation.text}", _earlier_sentence(facts)]
    text += [facts.vain_text and f"{facts.vain_text}."]
    text += [_loss_sentence(facts, explanation), _imports_sentence(facts)]
    text += [f"It is a rerun of {event.of}." for event in facts.select(Rerun)[:1]]
    hint = explanation.hint
    if hint and not (facts.is_executable or _HARMLESS_HINT.fullmatch(hint)):
        is_live = explanation.kind in _LIVE_KINDS
        hint = "" if is_live else "to run its script, submit that as a run of your own"
    return replace(explanation, text=" ".join(filter(None, text)), hint=hint)


def _explain_state(facts: RunFacts) -> Explanation:
    """Explain a run's state or end; the first case that applies decides. The text lacks its
    subject, and begins with its verb; so do the texts of the functions that are called here."""
    if facts.tasks:
        return _explain_array(facts)
    if facts.problem:
        return Explanation("unreadable", f"can't be read: {facts.problem}.")
    if is_finished(facts.events):
        return _explain_finished(facts)
    if _is_over_for_good(facts):
        return explain_end(facts)
    if facts.live or facts.job_state:
        return _explain_live(facts)
    if facts.newest is None and not facts.select(Submitted, Queued):
        text = "was rendered but never submitted: nothing has happened to it yet."
        script = shlex.quote(str(facts.path / "job.sbatch"))
        return Explanation("rendered", text, f"sbatch {script}")
    return explain_end(facts)


def _is_over_for_good(facts: RunFacts) -> bool:
    """Return whether no attempt follows by itself, even if Slurm still shows the job: by the newest
    attempt's verdict, or since the run was cancelled.

    False after a superseded attempt. Without a verdict the result is True only for a cancelled run
    that no process of this machine plays.
    """
    verdict = facts.verdict
    if verdict is None:
        return facts.cancelled and not facts.live
    if verdict.cause == Cause.SUPERSEDED:  # a later start may be live that has no event yet
        return False
    # Without Slurm's queue the next attempt begins at once, or when the user starts it.
    no_requeue = facts.spec.get("backend") in ("local", "salloc") and not facts.live
    return facts.cancelled or no_requeue or verdict.action != Action.REQUEUE


def _add_last_attempt(facts: RunFacts, explanation: Explanation) -> Explanation:
    """Return `explanation`, that of a run which waits for its next attempt or whose attempt is just
    ending, with the end of the newest attempt added to its text.

    The hint stays, with two exceptions. Where the failure will come again (`REPEATING_KINDS`), it
    is the end's hint. After a preemption, if Slurm's reason is one of `_USUAL_REASONS`, the hint is
    to wait.
    """
    last_end = explain_attempt(facts)
    text, hint = f"{explanation.text} Its last attempt {last_end.text}", explanation.hint
    if last_end.kind in REPEATING_KINDS:
        hint = last_end.hint
    elif last_end.kind == "preempted" and facts.record and facts.record.reason in _USUAL_REASONS:
        hint = "wait: it starts by itself"
    return replace(explanation, text=text, hint=hint)


def _run_title(path: Path) -> str:
    """Return ``Run NAME (ID)``, or for an array's task ``Task 3 (lr=0.1) of run NAME (ID)``, by its
    folder; a trial that can't be read from the array's job.json is left out."""
    if path.name.startswith("task-"):
        array = path.parent
        task = f"Task {path.name.removeprefix('task-')}{trial_text(RunFolder(path))}"
        return f"{task} of run {array.parent.name} ({array.name})"
    return f"Run {path.parent.name} ({path.name})"


def _explain_finished(facts: RunFacts) -> Explanation:
    """Explain a finished run by its steps, attempts, wall time and goodput. The hint is the command
    that exports its model; '' where no checkpoint of hpc-ddp's is on disk."""
    step = last_step(facts.events)
    steps = f" after {step} steps" if step is not None else ""
    attempts = plural(len(_attempt_ends(facts)), "attempt")
    wall_s = facts.events[-1].time - facts.events[0].time
    text = f"is finished{steps}, in {attempts} and {duration(wall_s)}."
    text += _goodput_text(goodput.account(facts.events))
    if facts.verdict is not None and facts.verdict.why:
        text += f" {facts.verdict.why}."
    is_ours = facts.saved is not None and not facts.library
    # With this flag Python does not look for modules in the current folder first, in which other
    # users may have files.
    flag = "-P" if sys.version_info >= (3, 11) else "-I"
    export = f"python {flag} -m hpc_ddp.training.export {quoted_path(facts)} model.safetensors"
    return Explanation("finished", text, export if is_ours else "")


def _explain_array(facts: RunFacts) -> Explanation:
    """Explain an array by the number of its tasks of each kind, the first `MOST_TRIALS` trials of a
    sweep, and the reason why tasks wait. The first task that is neither finished nor live is
    explained in full, with its hint; without one the hint is ''."""
    tasks = {name: explain(task) for name, task in facts.tasks.items()}
    kinds = Counter(task.kind for task in tasks.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    text = f"is an array, of which {plural(len(tasks), 'task')} have begun: {counts}."
    trials = [(name, trial_text(RunFolder(facts.tasks[name].path))) for name in tasks]
    kinds_by_trial = [f"task {name}{trial}: {tasks[name].kind}" for name, trial in trials if trial]
    if kinds_by_trial:
        more = ["…"] if kinds_by_trial[MOST_TRIALS:] else []
        text += f" Its trials: {'; '.join([*kinds_by_trial[:MOST_TRIALS], *more])}."
    bad = [index for index, task in tasks.items() if task.kind not in ("finished", *_LIVE_KINDS)]
    if facts.record and facts.record.state == "PENDING":
        words, _ = explain_pending(facts.record.reason, facts.job_id or "")
        text += f" Others wait: {words}."
    if not bad:
        return Explanation("array", text, "", tasks=tasks)
    task = tasks[bad[0]]
    if bad[1:]:
        text += f" Of the others see: hpc-ddp explain {quoted_path(facts)}/task-{bad[1]}."
    return Explanation("array", f"{text} {task.text}", task.hint, tasks=tasks)


# --- a live run ----------------------------------------------------------------------------


def _explain_live(facts: RunFacts) -> Explanation:
    """Explain a run that has a live job, or a process on this machine: as waiting, suspended,
    ending or running, the first that fits."""
    record, state = facts.record, facts.job_state
    if record and state is RunState.WAITING:
        words, hint = explain_pending(record.reason, facts.job_id or "")
        text = f"waits in the queue as job {facts.job_id}: {words} ({record.reason or 'None'})."
        if record.start_time and record.start_time > facts.now:
            start_time = time.strftime("%a %H:%M", time.localtime(record.start_time))
            text += f" Slurm expects to start it on {start_time}."
        return Explanation("waiting", text, hint)
    if record and state is RunState.SUSPENDED:
        text = f"is suspended on {record.nodes}: Slurm has stopped it, and lets it go on later."
        return Explanation("suspended", text, "wait")
    if facts.verdict or state is RunState.ENDING:
        return Explanation("ending", "is just ending.", f"hpc-ddp explain {quoted_path(facts)}")
    return _explain_running(facts, record.nodes if record else "this machine")


def _explain_running(facts: RunFacts, nodes: str) -> Explanation:
    """Explain the newest attempt while it runs on `nodes`, their names as text: by its progress,
    newest checkpoint, goodput, a slow rank, and silence. If the last save has failed, the failure
    takes the place of all that comes behind the progress."""
    events = [event for event in facts.events if event.attempt == facts.newest]
    started = last_event(events, Started)
    if started is None:
        return Explanation("running", f"has just been started on {nodes}.", "wait")
    hint = "" if facts.standalone else f"hpc-ddp logs -f {quoted_path(facts)}"
    text = f"has been running on {nodes} for {duration(max(0.0, facts.now - started.time))}"
    if not last_event(events, FirstStep):
        progress = "has not done its first step yet" if facts.has_progress else "reports no steps"
        return Explanation("running", f"{text}, and {progress}.", hint)
    metrics = _total_and_loss(last_event(events, MetricsLine))
    text += f", and is at step {last_step(facts.events)}{metrics}."
    saved, failed = last_event(facts.events, CheckpointSaved), last_event(events, SaveFailed)
    if failed and (not saved or failed.time > saved.time):
        text += f" ITS LAST SAVE FAILED ({shorten(failed.error)}); the third in a row ends it."
        diagnosis = recognise_failure(failed.error)
        hint = fill_hint(facts, diagnosis.hint if diagnosis else "df -h {path}", {})
        return Explanation("running", text, hint)
    text += _save_sentence(facts, saved)
    text += _goodput_text(goodput.account(facts.events, facts.now))
    if slow := slow_rank(events):
        text += f" But {slow}: the others wait for it."
    quiet_s = facts.now - events[-1].time
    if quiet_s > QUIET_S:
        text += f" But it has reported nothing for {duration(quiet_s)}: it may hang."
    return Explanation("running", text, hint)


def _save_sentence(facts: RunFacts, saved: CheckpointSaved | None) -> str:
    """Return a sentence, with a blank before it, on a run's newest save (None: it has none)."""
    if saved is None:
        return " It has saved nothing yet."
    age = duration(max(0.0, facts.now - saved.time))
    return f" Its newest checkpoint is of step {saved.step}, and {age} old."


def _goodput_text(seconds: dict[str, float]) -> str:
    """Return sentences on the goodput, and on the cost of starts where that is much, with a blank
    before them; '' where the goodput is not known. `seconds` is the wall time by part."""
    share = goodput.share(seconds)
    costs = goodput.start_costs(seconds)
    return "" if share is None else f" Goodput {share:.0%}." + (costs and f" {costs}")


def _imports_sentence(facts: RunFacts) -> str:
    """Return a sentence that recommends ``--stage`` where the newest attempt imported slowly and
    ``--stage`` could have been used; else ''."""
    workers = facts.select(WorkerStarted, attempt=facts.newest)
    is_excluded = any(facts.spec.get(key) for key in ("stage", "container", "image"))
    if not workers or is_excluded or facts.standalone or facts.spec.get("backend") == "submitit":
        return ""
    # Without the fork server's times: from the worker's begin to its call of start().
    began = workers[-1].imports_began or workers[-1].began
    seconds = (workers[-1].imports_ended or workers[-1].called) - (began or math.inf)
    if seconds < SLOW_IMPORTS_S:  # also -inf, where the begin is not known
        return ""
    text = f"Its imports took {duration(seconds)}"
    return f"{text}: with --stage its requeued starts read all that they import in one go."


def _total_and_loss(metrics: MetricsLine | None) -> str:
    """Return the number of all steps and the loss in `metrics`, as far as they are known, as
    `` of 1000 (loss 0.5)``; '' for None."""
    if metrics is None:
        return ""
    total, loss = metrics.total_steps, metrics.number("loss")
    return (f" of {total}" if total else "") + (f" (loss {loss:.4g})" if loss is not None else "")


# --- earlier attempts and lost steps -------------------------------------------------------

# The end of an attempt, by the verdict's cause.
_ENDS = {
    Cause.PREEMPTED: "was preempted",
    Cause.TIME_LIMIT: "ran into its time limit",
    Cause.NOTICE: "was asked to stop",
    Cause.FAILED: "failed",
    Cause.STOOD_STILL: "failed after a suspension",
    Cause.CANCELLED: "was cancelled",
    Cause.FINISHED: "finished",
    Cause.SUPERSEDED: "was requeued, by Slurm or with scontrol requeue,",
    Cause.NODE_LOST: "lost a node",
    Cause.BAD_NODE: "met a bad node",
}
_NO_VERDICT = "ended without a word"
# Kinds of ends that are no fault of the script's: it may go on from a checkpoint of its own.
_NO_FAULT = ("preempted", "time limit", "stopped", "node lost", "waiting", "killed")


def _attempt_ends(facts: RunFacts) -> dict[int, str]:
    """Return a phrase on the end of each attempt, by number, in ascending order. That of an attempt
    without a verdict, also of one that still runs, is `_NO_VERDICT`."""
    ends: dict[int, str] = {}
    started = facts.select(Started)
    standalone = {event.attempt for event in started if event.backend == "local"}
    for event in facts.select(Stopped, RankFailed):
        if event.attempt in standalone:
            cause = Cause.NOTICE if isinstance(event, Stopped) else Cause.FAILED
            ends[event.attempt] = _ENDS[cause]
    for verdict in facts.select(VerdictGiven):
        # If no worker has made a step, the node may be well.
        is_unsure = verdict.cause == Cause.NODE_LOST and verdict.step is None
        end = _NO_VERDICT if is_unsure else _ENDS.get(verdict.cause, _NO_VERDICT)
        ends[verdict.attempt] = end
    numbers = {*facts.attempts, *ends, *(event.attempt for event in started)}
    return {attempt: ends.get(attempt, _NO_VERDICT) for attempt in sorted(numbers)}


def _earlier_sentence(facts: RunFacts) -> str:
    """Return a sentence on the ends of the attempts before the newest; '' without such attempts."""
    ends = [end for attempt, end in _attempt_ends(facts).items() if attempt != facts.newest]
    counts = [f"{end} {_times_text(count)}" for end, count in Counter(ends).items()]
    return f"Before that it {' and '.join(counts)}." if counts else ""


def _times_text(count: int) -> str:
    """Return ``once``, ``twice``, ``3 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _count_lost(facts: RunFacts) -> tuple[int | None, float | None]:
    """Return how many steps no checkpoint has, and the seconds that the newest attempt took for
    them.

    Both are None where this attempt did not reach its training, and 0 where it stopped or finished
    in order. Without a checkpoint on disk all steps of the run count.
    """
    events = [event for event in facts.events if event.attempt == facts.newest]
    began = last_event(events, TrainingBegun) or last_event(events, FirstStep)
    step = last_step(facts.events)
    if began is None or step is None:
        return None, None
    if last_event(events, Stopped, Finished):  # both come when all is saved
        return 0, 0.0
    saved = last_event(events, CheckpointSaved)
    # A checkpoint has the state from before it was written.
    since = saved.time - saved.write_s if saved else began.time
    times = [event.time for event in events if _is_progress(event)]
    return max(0, step - (facts.saved or 0)), max(0.0, max(times, default=since) - since)


def _is_progress(event: JournalEvent) -> bool:
    """Return whether an event was written at the end of its step. A verdict and the report of a
    hang have a step, too, but are written minutes after it."""
    is_hang = isinstance(event, RankFailed) and event.error.startswith("HangError")
    is_late = is_hang or isinstance(event, VerdictGiven)
    return step_of(event) is not None and not is_late


def _loss_sentence(facts: RunFacts, explanation: Explanation) -> str:
    """Return the sentence on lost steps. For a script that reports no steps, and did not fail by
    itself, the sentence says that the progress is unknown. Return '' for a run that runs, is
    suspended, is finished or was only rendered, for an array, and where the newest attempt did not
    reach its training."""
    if explanation.kind in ("finished", "rendered", "array", "running", "suspended"):
        return ""
    if explanation.lost_steps is None:
        if facts.newest is None or facts.has_progress or explanation.kind not in _NO_FAULT:
            return ""
        is_maybe_finished = facts.verdict and facts.verdict.kind == EndKind.MAYBE_FINISHED
        begin = "it may have finished" if is_maybe_finished else "it starts over"
        return f"Its progress is unknown: {begin}, or goes on from its own checkpoints."
    if not explanation.lost_steps:
        return f"Nothing is lost: step {explanation.step} is saved." if explanation.step else ""
    steps = plural(explanation.lost_steps, "step")
    lost = f"{steps} ({duration(explanation.lost_s or 0.0)})"
    if facts.saved is None:
        return f"Nothing had been saved: {lost} are lost."
    return f"The newest checkpoint is of step {facts.saved}: {lost} are to be done again."
