"""Whether an attempt may start, and the verdict after it: facts from the journal and from Slurm.

`verdict.decide` decides from the facts that are gathered here; this module records the decision.
"""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import patiently
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.trackers import sync_commands
from hpc_ddp.core.journal.enums import Action, Cause, NoticeSource
from hpc_ddp.core.journal.events import (
    CheckpointRestored,
    CheckpointSaved,
    JournalEvent,
    NoticeGiven,
    Submitted,
    TrainingBegun,
    VerdictGiven,
)
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.child_process import NO_GROUP
from hpc_ddp.node.outcome import oom
from hpc_ddp.node.outcome.attempt_facts import AttemptFacts, keep_few, silent_nodes
from hpc_ddp.node.outcome.bounds import over_budget, over_requeues, too_many_silent
from hpc_ddp.node.outcome.end_message import GIVEN_UP, notify
from hpc_ddp.node.outcome.first_failure import Failure
from hpc_ddp.node.outcome.verdict import Verdict, decide
from hpc_ddp.slurm_text import Job

# Texts of errors for want of room on a disk: errno ENOSPC and EDQUOT.
NO_ROOM = re.compile(r"\[Errno (28|122)\]|No space left on device|Disk quota exceeded")
APART = (
    "WARNING: no process group was formed: unless the script joins its {count} workers by other"
    " means, each of them has trained alone"
)

# --- before an attempt ---------------------------------------------------------------------


def enforce_budget(run: RunFolder, spec: JobSpec) -> None:
    """Refuse to start an attempt if the run, or all tasks of its array together, have used up the
    budget of GPU hours (``--budget-gpu-hours``); do nothing without a budget.

    Raises
    ------
    HpcDdpError
        the budget is used up; this is journalled as a verdict, and the job's message is sent
    OSError
        the journals can't be read
    """
    over_text = over_budget(spec, _gpu_hours(run, spec))
    if over_text:
        hint = f"hpc-ddp submit --run {RunFolder(run.whole).quoted} --budget-gpu-hours HOURS"
        _give_up(run, spec, Cause.BUDGET, over_text, hint)


def limit_silent_ends(run: RunFolder, spec: JobSpec) -> None:
    """Refuse to start an attempt where too many attempts since the last submit have ended without a
    verdict, by `too_many_silent`. Preempted attempts do not count among those in a row: Slurm's
    accounting is asked for them, but only if the start would be refused.

    A job may take its first node down each time, and with it the batch shell that would count.

    Raises
    ------
    HpcDdpError
        too many attempts have; this is journalled as a verdict, and the job's message is sent
    OSError
        the journal can't be read, or the attempts can't be listed
    """
    events = run.events()
    first = _first_attempt(events, math.inf)
    numbers = [attempt.number for attempt in run.attempts() if attempt.number >= first]
    events = since_submit(events)
    why = too_many_silent(spec, run.most_requeues, events, numbers)
    if why:
        events += [*_find_preemptions(run), *_find_vain_boots(run, events)]
        why = too_many_silent(spec, run.most_requeues, events, numbers)
    if why:
        hint = f"hpc-ddp submit --run {RunFolder(run.whole).quoted} goes on all the same"
        _give_up(run, spec, Cause.NODE_LOST, why, hint)


def _find_preemptions(run: RunFolder) -> list[JournalEvent]:
    """Ask Slurm's accounting how each start of the run's jobs ended; return a notice for each
    attempt whose start was preempted, in no order; [] without an answer. A job that is preempted
    while its container starts has no process that could journal a notice. Raise OSError if the
    attempts can't be listed."""
    infos = [(attempt.number, attempt.info) for attempt in run.attempts()]
    # By a job's id and the number of its restarts, which is the start's index in the accounting.
    attempt_of = {(info.get("job_id"), info.get("restarts")): number for number, info in infos}
    job_ids = {info["job_id"] for _, info in infos if info.get("job_id")}
    return [
        NoticeGiven(NoticeSource.PREEMPTION, attempt=attempt_of[job_id, restarts])
        for job_id in job_ids
        for restarts, state in enumerate(slurm.starts_in_accounting(job_id))
        if state == "PREEMPTED" and (job_id, restarts) in attempt_of
    ]


def _find_vain_boots(run: RunFolder, events: list[JournalEvent]) -> list[JournalEvent]:
    """Return a notice for each attempt that is superseded by a verdict in `events`, and in which no
    supervisor has begun, by number. Raise OSError if a folder can't be listed.

    In such an attempt a node of a cloud did not boot, and Slurm has requeued the job. The batch
    script on the first node does not wait until the other nodes have booted."""
    verdicts = [event for event in events if isinstance(event, VerdictGiven)]
    superseded = {verdict.attempt for verdict in verdicts if verdict.cause == Cause.SUPERSEDED}
    return [
        NoticeGiven(NoticeSource.PREEMPTION, attempt=attempt.number)
        for attempt in run.attempts()
        if attempt.number in superseded and not attempt.nodes()
    ]


def _give_up(run: RunFolder, spec: JobSpec, cause: Cause, why: str, hint: str) -> NoReturn:
    """Journal for the last attempt a verdict with `cause` that gives the run up; send the job's
    message; raise HpcDdpError with the reason `why`, and `hint`, to refuse the next attempt. Raise
    OSError where the attempts can't be listed."""
    journal = run.journal("batch", max(run.next_attempt() - 1, 0))
    journal.write(VerdictGiven(cause, Action.GIVE_UP, why, 1, False, None, (), "given up"))
    notify(run, spec, GIVEN_UP, why)
    raise HpcDdpError(why, hint=hint)


# --- after an attempt ----------------------------------------------------------------------


def preview_cause(
    run: RunFolder, attempt: AttemptFolder, environ: dict[str, str], job: Job | None
) -> Cause:
    """Return the cause of the verdict that `judge_attempt` would give now, without journalling it;
    arguments and errors are those of `_gather_facts`."""
    return decide(_gather_facts(run, attempt, environ, job)).cause


def judge_attempt(
    run: RunFolder,
    attempt: AttemptFolder,
    environ: dict[str, str],
    job: Job | None,
    goes_on: bool = True,
) -> tuple[AttemptFacts, Verdict]:
    """Gather the facts of an attempt that has ended and decide how the run continues; journal and
    print the verdict; return the facts and the verdict. The caller carries the verdict out.

    `environ`, `job` and errors are those of `_gather_facts`. Where nodes are silent, and no failure
    is recorded, the job's output is searched for a step that was out of memory. `goes_on` is False
    where the user has to continue the run, not Slurm: the printed text says so. With ``--stage``,
    `judge_stage` may change the verdict and remove the run's parcel. If the journal refuses the
    verdict, that is only printed.
    """
    facts = patiently(partial(_gather_facts, run, attempt, environ, job))
    nodes, spec = facts.nodes, facts.spec
    silent = silent_nodes(spec, nodes, facts.records)
    if silent and not (facts.complete or facts.lost_nodes or facts.failure):
        records = [*facts.records, *oom.step_records(silent, _last_output(run))]
        facts = replace(facts, records=records)
    verdict = decide(facts)
    if verdict.cause == Cause.NODE_LOST and job:
        # No supervisor began there: Slurm calls the node up, but it has lost the disk, say.
        mute_nodes = [node for node in silent if not attempt.node(node).path.exists()]
        facts = replace(facts, mute_nodes=keep_few(mute_nodes, nodes))
    if spec.stage:
        verdict = judge_stage(run, facts, verdict, attempt.staged)
    if verdict.cause == Cause.FINISHED and (attempt.node(nodes[0]).path / NO_GROUP).exists():
        verdict = replace(verdict, why=APART.format(count=len(nodes) * spec.workers_per_node))
    _record_verdict(run, attempt, facts, verdict, goes_on)
    return facts, verdict


def _gather_facts(
    run: RunFolder, attempt: AttemptFolder, environ: dict[str, str], job: Job | None
) -> AttemptFacts:
    """Return the facts of an attempt that has ended, without its `mute_nodes`.

    `environ` has the attempt's variables. `job` is Slurm's record of the job, None without an
    answer and without Slurm; with a record, Slurm is also asked for the state of silent nodes.
    Raise OSError if the run's folder can't be read, UsageError for a broken job.json, KeyError,
    TypeError or ValueError for a damaged file of the attempt.
    """
    env, records = AttemptEnv.from_env(environ), attempt.records()
    nodes = list(env.nodes)
    spec = JobSpec.from_json(patiently(run.job_json.read_bytes))
    events = run.events()
    return AttemptFacts(
        spec=spec,
        attempt=attempt.number,
        cancelled=run.cancelled.exists(),
        superseded=not run.is_newest(attempt.number),
        job=job,
        restarts=env.restarts,
        nodes=nodes,
        records=records,
        lost_nodes=slurm.unusable_nodes(silent_nodes(spec, nodes, records)) if job else [],
        events=since_submit(events, attempt.number),
        had_begun=last_event(events, TrainingBegun) is not None,
        gpu_hours=_gpu_hours(run, spec),
        most_requeues=run.most_requeues,
    )


def _last_output(run: RunFolder) -> Path:
    """Return the last of the files with the output of the run's jobs (`RunFolder.outputs`);
    ``slurm.out``, which may not exist, where there is none or the disk does not answer."""
    try:
        return next(reversed(run.outputs()), run.slurm_out)
    except OSError:
        return run.slurm_out


def judge_stage(run: RunFolder, facts: AttemptFacts, verdict: Verdict, staged: set[str]) -> Verdict:
    """Return the verdict of a run with ``--stage``: `verdict`, or, once in a run, a requeue without
    the copy of the environment where that copy may be at fault. `staged` has the kinds of copies
    from which a Python of the attempt has started (`AttemptFolder.staged`).

    The copy may be at fault where `verdict` gives up after an attempt with a copy; where a worker
    was killed for want of memory, and the copy lay in memory; and where the disk with the run's
    parcel is full. The run is then marked as `unstaged`, and its parcel is removed; the parcel of
    an array stays for the other tasks, unless the disk is full. `verdict` stays for a run beyond
    its budget or its limit of requeues, and for a run that can't be marked.

    The parcel of a finished run is removed, too, unless the run is a task of an array.
    """
    if verdict.cause == Cause.FINISHED and not run.is_task:
        shutil.rmtree(run.parcel, ignore_errors=True)
    # By any cause but FAILED: the requeue without the copy is no retry after a failure.
    is_over = over_budget(facts.spec, facts.gpu_hours) or over_requeues(facts, Cause.NODE_LOST)
    error = facts.failure.error if facts.failure else ""
    is_full = bool(NO_ROOM.search(error)) and run.parcel.exists()
    is_killed = error == oom.KILLED and "staged-memory" in staged
    is_doubtful = bool(staged) and verdict.action == Action.GIVE_UP and not is_over
    is_in_the_way = (is_full or is_killed) and verdict.action != Action.NONE
    if not (is_doubtful or is_in_the_way) or run.unstaged.exists():
        return verdict
    if is_full or not run.is_task:
        shutil.rmtree(run.parcel, ignore_errors=True)
    try:
        text = "the disk was full" if is_full else "an attempt has ended from the copy of --stage"
        run.unstage(text)
    except OSError:  # without the mark each attempt might end so, and be requeued for it
        return verdict
    why = f"{verdict.why}; next it starts without the copy of --stage"
    return verdict if is_over else Verdict(verdict.cause, Action.REQUEUE, why)


def _record_verdict(
    run: RunFolder, attempt: AttemptFolder, facts: AttemptFacts, verdict: Verdict, goes_on: bool
) -> None:
    """Write the verdict to the journal; print it (`_announce_verdict`), and, unless Slurm requeues
    the run by itself, the commands that send what trackers have recorded offline. `goes_on` is as
    in `judge_attempt`. If the journal still refuses the verdict after a minute, the refusal is only
    printed. Raise OSError where the run's folder can't be listed."""
    has_failed = verdict.cause in (Cause.FAILED, Cause.STOOD_STILL)
    failure = facts.failure if has_failed else None
    fields_of_failure: dict[str, Any] = {}
    if failure:
        fields_of_failure = {"rank": failure.rank, "node": failure.node, "error": failure.error}
    sequel = _sequel(facts, verdict.action, goes_on)
    event = VerdictGiven(
        verdict.cause,
        verdict.action,
        verdict.why,
        verdict.exit_code,
        facts.progress,
        facts.step,
        list(facts.bad_nodes),
        sequel,
        **fields_of_failure,
        kind=verdict.kind,
        bound=verdict.refusal.bound if verdict.refusal else None,
        why_not=verdict.refusal.text if verdict.refusal else None,
    )
    run.journal("batch", attempt.number).write_surely(event)
    _announce_verdict(attempt, failure, verdict, sequel)
    if verdict.action != Action.REQUEUE or not goes_on:
        for command in sync_commands(run):
            say(f"recorded offline; to send it: {command}")


def _announce_verdict(
    attempt: AttemptFolder, failure: Failure | None, verdict: Verdict, sequel: str
) -> None:
    """Print to stderr, the job's output, the path of the log of the failed worker, or of torchrun,
    if `failure` is given; then the verdict, and what follows (`sequel`)."""
    if failure:
        node = attempt.node(failure.node)
        log = node.agent_log if failure.rank is None else node.rank_log(failure.rank)
        if failure.rank is not None or log.exists():  # no agent log: the supervisor did not begin
            say(f"its log: {log}")
    if verdict.action == Action.NONE:
        why = f"; {verdict.why}" if verdict.why else ""
        say(f"attempt {attempt.number}: {verdict.cause}{why}")
    else:
        say(f"attempt {attempt.number}: {verdict.why}; {sequel}")


def _sequel(facts: AttemptFacts, action: Action, goes_on: bool) -> str:
    """Return in words what follows an attempt by the verdict's `action`, '' where nothing does. For
    a requeue: "it can go on" where the user has to continue the run (`goes_on` is False); "it goes
    on" if the attempt has a step in the journal, and a checkpoint was saved or restored since the
    last submit; else "it is started again"."""
    if action != Action.REQUEUE:
        return "given up" if action == Action.GIVE_UP else ""
    if not goes_on:
        return "it can go on"
    # The words promise no more than the journal shows: a script may also save by itself.
    is_kept = facts.step is not None and last_event(
        facts.events, CheckpointSaved, CheckpointRestored
    )
    return "it goes on" if is_kept else "it is started again"


def _gpu_hours(run: RunFolder, spec: JobSpec) -> float:
    """Return the GPU hours that a run, or all tasks of its array, have used; 0 for a job without a
    budget. Raise OSError if the journals can't be read."""
    return 0.0 if spec.budget_gpu_hours is None else run.gpu_hours(spec.gpus_in_use)


def since_submit(events: list[JournalEvent], attempt: float = math.inf) -> list[JournalEvent]:
    """Return the `events`, a run's, of the attempts since the submit to which attempt number
    `attempt` belongs (inf: since the last submit); all events without a submit. So a run that is
    submitted again, with fixed code, has its retries anew.

    The attempts' numbers decide, not times: the login node's clock may differ.
    """
    first = _first_attempt(events, attempt)
    return [event for event in events if event.attempt >= first]


def _first_attempt(events: list[JournalEvent], attempt: float) -> int:
    """Return the number of the first attempt of the submit to which attempt number `attempt` (inf:
    the newest) belongs, 0 without a submit. A later submit, whose job may still wait, does not
    count."""
    submits = [event for event in events if isinstance(event, Submitted)]
    numbers = (submit.first_attempt for submit in submits)
    return max((number for number in numbers if number <= attempt), default=0)
