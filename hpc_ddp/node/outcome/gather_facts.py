"""Whether an attempt may start, and the verdict after it: facts from the journal and from Slurm.

`verdict` decides from these facts; here they are gathered, and the decision is written down.
"""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
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
    VerdictGiven,
)
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.child_process import NO_GROUP
from hpc_ddp.node.outcome import oom
from hpc_ddp.node.outcome.end_message import GIVEN_UP, notify
from hpc_ddp.node.outcome.silent_ends import few_of, silent_nodes, too_many_silent
from hpc_ddp.node.outcome.verdict import (
    AttemptFacts,
    Verdict,
    decide,
    over_budget,
    over_requeues,
)
from hpc_ddp.slurm_text import Job

# In an error of the script's, or of a checkpoint: errno ENOSPC and EDQUOT.
NO_ROOM = re.compile(r"\[Errno (28|122)\]|No space left on device|Disk quota exceeded")
APART = (
    "WARNING: no process group was formed: unless the script joins its {count} workers by other"
    " means, each of them has trained alone"
)

# --- before an attempt ---------------------------------------------------------------------


def check_budget(run: RunFolder, spec: JobSpec) -> None:
    """Refuse to start an attempt if the run, or all tasks of its array together, have used up the
    budget of GPU hours (``--budget-gpu-hours``).

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


def check_silent_ends(run: RunFolder, spec: JobSpec) -> None:
    """Refuse another attempt where too many since the last submit have ended without a verdict, by
    `too_many_silent`. Preempted attempts do not count: the accounting is asked for them.

    A job may take its first node down each time, and with it the batch shell that would count.

    Raises
    ------
    HpcDdpError
        too many attempts have; this is journalled as a verdict, and the job's message is sent
    OSError
        the journal can't be read
    """
    events = run.events()
    numbers = [attempt.number for attempt in run.attempts()]
    first = _first_attempt(events, math.inf)
    numbers = [number for number in numbers if number >= first]
    events = since_submit(events)
    why = too_many_silent(spec, run.most_requeues, events, numbers)
    if why:  # the accounting is asked now alone
        events += [*_find_preemptions(run), *_vain_boots(run, events)]
        why = too_many_silent(spec, run.most_requeues, events, numbers)
    if why:
        hint = f"hpc-ddp submit --run {RunFolder(run.whole).quoted} goes on all the same"
        _give_up(run, spec, Cause.NODE_LOST, why, hint)


def _find_preemptions(run: RunFolder) -> list[JournalEvent]:
    """Ask Slurm's accounting how each start of the run's jobs ended; return a notice for each
    attempt whose start was preempted, in no order; [] without an answer. A job that is preempted
    while its container starts has no process that could journal a notice. Raise OSError if the
    attempts can't be listed."""
    attempts = [(attempt.number, attempt.info) for attempt in run.attempts()]
    # By a job and the index of its start.
    numbers = {(job.get("job_id"), job.get("restarts")): number for number, job in attempts}
    job_ids = {job["job_id"] for _, job in attempts if job.get("job_id")}
    return [
        NoticeGiven(NoticeSource.PREEMPTION, attempt=numbers[job_id, start])
        for job_id in job_ids
        for start, state in enumerate(slurm.starts_in_accounting(job_id))
        if state == "PREEMPTED" and (job_id, start) in numbers
    ]


def _vain_boots(run: RunFolder, events: list[JournalEvent]) -> list[JournalEvent]:
    """Return a notice for each superseded attempt in which no supervisor has begun: a node of a
    cloud did not boot, and Slurm has requeued the job. The batch script on the first node does not
    wait until the other nodes have booted."""
    superseded = {e.attempt for e in events
                  if isinstance(e, VerdictGiven) and e.cause == Cause.SUPERSEDED}  # fmt: skip
    return [
        NoticeGiven(NoticeSource.PREEMPTION, attempt=attempt.number)
        for attempt in run.attempts()
        if attempt.number in superseded and not attempt.nodes()
    ]


def _give_up(run: RunFolder, spec: JobSpec, cause: Cause, why: str, hint: str) -> NoReturn:
    """Journal the verdict `cause` for the last attempt, so that no attempt follows it; send the
    job's message; raise HpcDdpError with the reason `why`, and `hint`, to refuse the next
    attempt."""
    journal = run.journal("batch", max(run.next_attempt() - 1, 0))
    journal.write(VerdictGiven(cause, Action.GIVE_UP, why, 1, False, None, (), "given up"))
    notify(run, spec, GIVEN_UP, why)
    raise HpcDdpError(why, hint=hint)


# --- after an attempt ----------------------------------------------------------------------


def judge(
    run: RunFolder,
    attempt: AttemptFolder,
    environ: dict[str, str],
    job: Job | None,
    goes_on: bool = True,
) -> tuple[AttemptFacts, Verdict]:
    """Gather the facts of an attempt that has ended and decide how the run continues; journal and
    print the verdict; return the facts and the verdict.

    `job` is Slurm's record of the job, None without an answer and without Slurm; with a record,
    Slurm is also asked for the state of silent nodes. Where no node is lost or has recorded a
    failure, the job's output is searched for a step that was out of memory. `goes_on` is False
    where the user has to continue the run, not Slurm: the text says so. With ``--stage``,
    `judge_stage` may change the verdict and remove the run's parcel. If the journal refuses the
    verdict, that is only printed.

    Raises OSError if the run's folder can't be read, UsageError for a broken job.json, KeyError,
    TypeError or ValueError for a damaged file of the attempt.
    """
    env, records = AttemptEnv.from_env(environ), attempt.records()
    nodes = list(env.nodes)
    spec = JobSpec.from_json(patiently(run.job_json.read_bytes))
    silent = silent_nodes(spec, nodes, records)
    facts = AttemptFacts(
        spec=spec,
        attempt=attempt.number,
        cancelled=run.cancelled.exists(),
        superseded=not run.is_newest(attempt.number),
        job=job,
        restarts=env.restarts,
        nodes=nodes,
        records=records,
        lost_nodes=slurm.unusable_nodes(silent) if job else [],
        events=since_submit(run.events(), attempt.number),
        gpu_hours=_gpu_hours(run, spec),
        most_requeues=run.most_requeues,
    )
    if silent and not (facts.complete or facts.lost_nodes or facts.failure):
        records = [*records, *oom.step_records(silent, _last_output(run))]
        facts = replace(facts, records=records)
    decided = decide(facts)
    if decided.cause == Cause.NODE_LOST and job:
        # Up for Slurm, and without the disk, say, or unable to start a container.
        mute_nodes = [node for node in silent if not attempt.node(node).path.exists()]
        facts = replace(facts, mute_nodes=few_of(mute_nodes, nodes))
    if spec.stage:
        decided = judge_stage(run, facts, decided, attempt.staged)
    if decided.cause == Cause.FINISHED and (attempt.node(nodes[0]).path / NO_GROUP).exists():
        decided = replace(decided, why=APART.format(count=len(nodes) * spec.workers_per_node))
    _record_verdict(run, attempt, facts, decided, goes_on)
    return facts, decided


def _last_output(run: RunFolder) -> Path:
    """Return the file to which this job's output goes; a file that may not exist where the disk
    does not answer."""
    try:
        return next(reversed(run.outputs()), run.slurm_out)
    except OSError:
        return run.slurm_out


def judge_stage(run: RunFolder, facts: AttemptFacts, decided: Verdict, staged: set[str]) -> Verdict:
    """Return the verdict of a run with ``--stage``: `decided`, or, once in a run, a requeue without
    the copy of the environment where that copy may be at fault.

    The copy may be at fault where `decided` gives up after an attempt that has `staged` Python
    (`AttemptFolder.staged`); where a worker was killed for want of memory, of which a copy in
    memory has taken some; and where the disk with the run's parcel is full. The run is then marked
    as `unstaged`, and its parcel is removed; the parcel of an array stays for the other tasks,
    unless the disk is full. A run beyond its budget or its limit of requeues keeps the verdict
    `decided`, and so does a run that can't be marked.

    The parcel of a finished run is removed, too, unless the run is a task of an array.
    """
    if decided.cause == Cause.FINISHED and not run.is_task:
        shutil.rmtree(run.parcel, ignore_errors=True)
    # The requeue without the copy is none of the failure's.
    is_over = over_budget(facts.spec, facts.gpu_hours) or over_requeues(facts, Cause.NODE_LOST)
    error = facts.failure.error if facts.failure else ""
    is_full = bool(NO_ROOM.search(error)) and run.parcel.exists()
    is_killed = error == oom.KILLED and "staged-memory" in staged
    is_doubtful = bool(staged) and decided.action == Action.GIVE_UP and not is_over
    is_in_the_way = (is_full or is_killed) and decided.action != Action.NONE
    if not (is_doubtful or is_in_the_way) or run.unstaged.exists():
        return decided
    if is_full or not run.is_task:
        shutil.rmtree(run.parcel, ignore_errors=True)
    try:
        text = "the disk was full" if is_full else "an attempt has ended from the copy of --stage"
        run.unstage(text)
    except OSError:  # then this might come again without end
        return decided
    why = f"{decided.why}; next it starts without the copy of --stage"
    return decided if is_over else Verdict(decided.cause, Action.REQUEUE, why)


def _record_verdict(
    run: RunFolder, attempt: AttemptFolder, facts: AttemptFacts, decided: Verdict, goes_on: bool
) -> None:
    """Write the verdict to the journal, and print to stderr, the job's output: the path of the log
    of the failed worker, or of torchrun; the verdict and its sequel; and, unless Slurm requeues the
    run by itself, the commands that send what trackers have recorded offline. If the journal still
    refuses the verdict after a minute, the refusal is only printed."""
    has_failed = decided.cause in (Cause.FAILED, Cause.STOOD_STILL)
    failure = facts.failure if has_failed else None
    where: dict[str, Any] = {}
    if failure:
        where = {"rank": failure.rank, "node": failure.node, "error": failure.error}
    event = VerdictGiven(
        decided.cause,
        decided.action,
        decided.why,
        decided.exit_code,
        facts.progress,
        facts.step,
        list(facts.bad_nodes),
        _sequel(facts, decided.action, goes_on),
        **where,
    )
    run.journal("batch", attempt.number).write_surely(event)
    if failure:
        node = attempt.node(failure.node)
        log = node.agent_log if failure.rank is None else node.rank_log(failure.rank)
        if failure.rank is not None or log.exists():  # none where a supervisor could not begin
            say(f"its log: {log}")
    if decided.action == Action.NONE:
        why = f"; {decided.why}" if decided.why else ""
        say(f"attempt {facts.attempt}: {decided.cause}{why}")
    else:
        say(f"attempt {facts.attempt}: {decided.why}; {event.then}")
    if decided.action != Action.REQUEUE or not goes_on:
        for command in sync_commands(run):
            say(f"recorded offline; to send it: {command}")


def _sequel(facts: AttemptFacts, action: Action, goes_on: bool) -> str:
    """Return in words what follows an attempt, '' where nothing does. A requeued run "goes on" if
    the attempt has a step in the journal, and a checkpoint was saved or restored since the last
    submit; else it "is started again"."""
    if action != Action.REQUEUE:
        return "given up" if action == Action.GIVE_UP else ""
    if not goes_on:
        return "it can go on"
    # Without one there may be checkpoints all the same, of an earlier attempt, or of a script that
    # uses nothing of hpc_ddp.training.
    is_kept = facts.step is not None and last_event(
        facts.events, CheckpointSaved, CheckpointRestored
    )
    return "it goes on" if is_kept else "it is started again"


def _gpu_hours(run: RunFolder, spec: JobSpec) -> float:
    """Return the GPU hours that a run with a budget has used, 0 for one without.

    Raise OSError if the journals can't be read.
    """
    return 0.0 if spec.budget_gpu_hours is None else run.gpu_hours(spec.gpus_in_use)


def since_submit(events: list[JournalEvent], attempt: float = math.inf) -> list[JournalEvent]:
    """Return the events of the attempts since the last submit, or since the newest submit whose
    first attempt is not after `attempt`; all events without a submit. So a run that is submitted
    again, with fixed code, has its retries anew.

    The attempts' numbers decide, not times: the login node's clock may differ.
    """
    first = _first_attempt(events, attempt)
    return [event for event in events if event.attempt >= first]


def _first_attempt(events: list[JournalEvent], attempt: float) -> int:
    """Return the number of the first attempt of the newest submit; submits whose first attempt is
    after `attempt` do not count, such as one whose job still waits. 0 without a submit."""
    submits = [event for event in events if isinstance(event, Submitted)]
    numbers = (submit.first_attempt for submit in submits)
    return max((number for number in numbers if number <= attempt), default=0)
