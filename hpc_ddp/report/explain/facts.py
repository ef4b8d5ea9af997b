"""The facts of a run: its journal, the nodes' records, the logs, and Slurm's own record.

Files that are half-written, damaged, or behind another user's link count as missing: `gather`
raises no error.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hpc_ddp import slurm
from hpc_ddp.core import checkpoints, process
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.file_owners import is_executable
from hpc_ddp.core.job.attempt_folder import AttemptFolder, NodeFolder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.journal.events import (
    JournalEvent,
    RankFailed,
    Started,
    Submitted,
    VerdictGiven,
    WorkerStarted,
)
from hpc_ddp.core.journal.journal import is_finished, last_event, last_step, read_briefly
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import ended_jobs
from hpc_ddp.report.explain.node_records import RecordedFailure, read_ends, tail
from hpc_ddp.report.status.state import RunState, state_of_job
from hpc_ddp.slurm_text import JobRecord

MOST_AGENT_LOGS = 64

T = TypeVar("T")
E = TypeVar("E", bound=JournalEvent)


def is_standalone(events: Sequence[JournalEvent]) -> bool:
    """Return whether the last start of a run was a plain ``python X.py`` or torchrun, by its
    journal `events`; False without a start.

    The output of such a start is not kept, and its end has no verdict.
    """
    last = last_event(events, Submitted, Started)
    return isinstance(last, Started) and last.backend == "local"


@dataclass(frozen=True)
class RunFacts:
    """All facts that an explanation is made from.

    Attributes
    ----------
    path, spec
        the run's folder, and the content of its ``job.json``, {} where that can't be read
    now
        when the facts were read, in unix seconds
    is_executable, problem
        whether the user may start something of it; why its journal can't be read, or ''
    events
        the journal; `attempts` the numbers of the attempts that have a folder
    job_id, record, refusal, is_forgotten
        the job that counts now (None before the first), Slurm's record of it (None without one),
        the error with which Slurm refused the last record that was asked for, or '', and whether
        that was since it has no such job any more
    cancelled, live
        whether the user has cancelled the run; whether a process of this machine plays it
    saved, library
        the step of the newest checkpoint on disk, None without one; the library that wrote it, or
        '' for hpc-ddp
    failure
        the failure that ended the newest attempt, by the nodes' records; None without one
    terminated
        the ranks that their supervisors ended, since others failed
    rank_log, agent_log, job_log
        the ends of the logs of the failed rank, of its torchrun, and of the job
    hang_places
        after a hang: the line of the user's code where each rank stood, by rank
    tasks
        the facts of an array's tasks, by their number
    """

    path: Path
    now: float
    is_executable: bool = True
    problem: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[JournalEvent] = ()
    attempts: Sequence[int] = ()
    job_id: str | None = None
    record: JobRecord | None = None
    refusal: str = ""
    is_forgotten: bool = False
    cancelled: bool = False
    live: bool = False
    saved: int | None = None
    library: str = ""
    failure: RecordedFailure | None = None
    terminated: Sequence[int] = ()
    rank_log: str = ""
    agent_log: str = ""
    job_log: str = ""
    hang_places: Mapping[int, str] = field(default_factory=dict)
    tasks: Mapping[str, RunFacts] = field(default_factory=dict)

    @cached_property  # read for each event
    def newest(self) -> int | None:
        """The newest attempt, by its folder or by its events; None before the first."""
        started = [event.attempt for event in self.select(Started)]
        return max([*self.attempts, *started], default=None)

    @property
    def verdict(self) -> VerdictGiven | None:
        """The newest attempt's verdict; None without one, and where the run was submitted again
        after it."""
        last = last_event(self.events, VerdictGiven)
        first = max((event.first_attempt for event in self.select(Submitted)), default=0)
        if last is None or last.attempt != self.newest or last.attempt < first:
            return None
        return last

    @property
    def job_state(self) -> RunState | None:
        """The state of the run by its live job; None when the job is over, or unknown."""
        return state_of_job(self.record.state) if self.record else None

    def select(self, *kinds: type[E], attempt: int | None = None) -> list[E]:
        """Return the events of these kinds, in order, of one attempt or (None) of all."""
        events: list[Any] = [event for kind in kinds for event in self._by_kind.get(kind, ())]
        if len(kinds) > 1:
            events.sort(key=lambda event: (event.attempt, event.time))
        return [event for event in events if attempt in (None, event.attempt)]

    @cached_property  # of a hundred thousand events, most of which are metrics
    def _by_kind(self) -> dict[type[JournalEvent], list[JournalEvent]]:
        """The events of each kind, in order."""
        by_kind: dict[type[JournalEvent], list[JournalEvent]] = {}
        for event in self.events:
            by_kind.setdefault(type(event), []).append(event)
        return by_kind

    @property
    def has_progress(self) -> bool:
        """Whether the script uses hpc_ddp.training, so that its progress is known: the journal has
        a step, of any attempt."""
        return last_step(self.events) is not None

    @property
    def standalone(self) -> bool:
        return is_standalone(self.events)

    @property
    def again(self) -> str:
        """The command that goes on with the run; of a standalone script words for it."""
        if self.standalone:
            return "the same command again"
        command = {"local": "hpc-ddp dry-run", "salloc": "hpc-ddp submit --backend salloc"}.get(
            str(self.spec.get("backend")), "hpc-ddp submit"
        )
        return f"{command} --run {shlex.quote(str(self.path))}"

    @property
    def with_new_code(self) -> str:
        """The command of `again` with a new snapshot of the code; `again` if `standalone`."""
        return self.again if self.standalone else f"{self.again} --new-code"


# --- gathering -----------------------------------------------------------------------------


def gather(run: RunFolder, events: Sequence[JournalEvent] | None = None) -> RunFacts:
    """Read a run's folder, and query Slurm if the run has a job; the same for each task of an
    array, but Slurm isn't asked for those that are over by their journals, besides the first of
    these that did not finish. Facts that can't be read have their default; nothing is raised.

    `events` is the run's journal; None: it is read here, and briefly (`read_briefly`).
    """
    return _gather(run, _try(lambda: is_executable(run), False), events)


def _gather(
    run: RunFolder,
    can_start: bool,
    events: Sequence[JournalEvent] | None = None,
    is_part: bool = False,
) -> RunFacts:
    """Return the facts of a run, or of a task of an array, by its `events`, as `gather` does (None:
    they are read here). `can_start` says whether the user may start something of it; with `is_part`
    Slurm isn't asked for a task that is over by its journal."""
    problem = ""
    try:
        events = read_briefly(run.journal_folder) if events is None else events
    except OSError as error:
        events, problem = (), f"{error.filename}: {error.strerror}"
    attempts = _try(run.attempts, list[AttemptFolder]())
    outputs = _try(run.outputs, list[Path]())
    facts = RunFacts(
        path=run.path,
        now=time.time(),
        is_executable=can_start,
        problem=problem,
        spec=read_json(run.job_json),
        events=events,
        attempts=[attempt.number for attempt in attempts],
        cancelled=_try(run.cancelled.exists, False),
        live=_is_live(events),
        saved=_try(lambda: _newest_checkpoint(run.checkpoints), None),
        library=_try(lambda: _library(run.checkpoints), ""),
        job_log=tail(outputs[-1]) if outputs else "",
        tasks=_gather_tasks(run, can_start),
    )
    jobs = _try(lambda: run.jobs(events), list[JobRef]())
    ended = _try(lambda: ended_jobs(run, events), list[JobRef]()) if is_part else []
    if (run.is_task and is_finished(events)) or (jobs and jobs[-1].is_among(ended)):
        facts = replace(facts, job_id=jobs[-1].id if jobs else None)
    else:
        facts = replace(facts, **_read_record(jobs))
    if attempts:
        facts = replace(facts, **_read_end(facts, attempts[-1]))
    return facts


def _gather_tasks(run: RunFolder, can_start: bool) -> dict[str, RunFacts]:
    """Return the facts of an array's tasks, by their number; {} for another run. `can_start` is as
    in `_gather`. Slurm isn't asked for the tasks that are over: there may be a thousand."""
    tasks: dict[str, RunFacts] = {}
    is_explained = False  # the first bad one, in full
    for task in _try(run.tasks, list[RunFolder]()):
        facts = _gather(task, can_start, is_part=True)
        was_asked = facts.record is not None or facts.refusal
        if not (is_explained or was_asked or is_finished(facts.events)):
            facts, is_explained = _gather(task, can_start), True
        tasks[str(task.index)] = facts
    return tasks


def _try(call: Callable[[], T], default: T) -> T:
    """Return what `call` reads from disk or from Slurm; `default` for OSError, ValueError and
    HpcDdpError."""
    try:
        return call()
    except (OSError, ValueError, HpcDdpError):
        return default


def _is_live(events: Sequence[JournalEvent]) -> bool:
    """Return whether the process of the newest attempt runs on this machine."""
    started = last_event(events, Started)
    return started is not None and _try(lambda: process.is_live(started.process), False)


def _newest_checkpoint(folder: Path) -> int | None:
    """Return the step of the newest checkpoint with its final name in a run's folder `checkpoints`,
    None without one; raise OSError where the folder can't be listed."""
    published = checkpoints.published(folder)
    return checkpoints.step_of(published[0]) if published else None


def _library(folder: Path) -> str:
    """Return the name of the library that wrote the newest checkpoint in a run's folder
    `checkpoints`, '' for hpc-ddp or without one; raise OSError or ValueError where it can't be
    read."""
    for newest in checkpoints.published(folder)[:1]:
        name = checkpoints.read_manifest(newest).get("format")
        return name if isinstance(name, str) else ""
    return ""


def _read_record(jobs: Sequence[JobRef]) -> dict[str, Any]:
    """Ask Slurm for the last two jobs, and return which of them counts: one that runs (a chain's
    newest job may wait behind it), else the newest that Slurm knows, else the newest.

    `jobs` are the run's jobs, oldest first. Returns fields of `RunFacts`: ``job_id`` (None without
    jobs), ``record`` (None without an answer), ``refusal``, Slurm's last error, and
    ``is_forgotten``, which are absent for a job that runs.
    """
    records: dict[str, JobRecord] = {}
    refusal, is_forgotten = "", False
    for job in jobs[-2:]:
        try:
            records[job.id] = slurm.find_record(job)
        except HpcDdpError as error:
            refusal, is_forgotten = error.message, isinstance(error, slurm.UnknownJobError)
            continue
        if records[job.id].state in ("RUNNING", "COMPLETING"):
            return {"job_id": job.id, "record": records[job.id]}
    newest = jobs[-1].id if jobs else None
    last = next(reversed(records), newest)
    return {
        "job_id": last,
        "record": records.get(last or ""),
        "refusal": refusal,
        "is_forgotten": is_forgotten,
    }


def _read_end(facts: RunFacts, attempt: AttemptFolder) -> dict[str, Any]:
    """Return fields of `RunFacts` about the end of the newest attempt, `attempt`, from the records
    and logs that its nodes and ranks left. A field that can't be read is empty."""
    nodes = _try(attempt.nodes, list[NodeFolder]())
    failures, hang_places = _try(
        lambda: read_ends(attempt), (list[RecordedFailure](), dict[int, str]())
    )
    # Failures before the last start do not count: the workers were started again.
    workers = facts.select(WorkerStarted, attempt=attempt.number)
    began = max((event.time for event in workers), default=0)
    failures += [
        RecordedFailure(event.rank, event.node, event.error, time=event.time)
        for event in facts.select(RankFailed, attempt=attempt.number)
        if event.time > began
    ]
    failure = _first_cause(facts, failures)
    node = attempt.node(failure.node) if failure and _is_name(failure.node) else None
    rank = failure.rank if failure else None
    # Without a failed node the reason may be in any node's: those of a thousand are alike.
    agent_logs = [] if node else [tail(n.agent_log)[-2000:] for n in nodes[:MOST_AGENT_LOGS]]
    return {
        "failure": failure,
        "terminated": sorted({f.rank for f in failures if f.was_terminated and f.rank is not None}),
        "rank_log": tail(node.rank_log(rank)) if node and rank is not None else "",
        "agent_log": tail(node.agent_log) if node else "".join(agent_logs),
        "hang_places": hang_places,
    }


def _is_name(node: str) -> bool:
    """Return whether a journal's name of a node may be the name of a folder."""
    return bool(node) and not set(node) & {"/", "\0"}


def _first_cause(facts: RunFacts, failures: Sequence[RecordedFailure]) -> RecordedFailure | None:
    """Return the failure that ended the newest attempt. It is the one that the verdict names, with
    its exit code by `failures`, else by the verdict, and its error by the verdict, else by
    `failures`. Where no verdict names a node, return the earliest of `failures` that is no
    consequence of another, else the earliest; None without any."""
    verdict = facts.verdict
    if verdict is None or verdict.node is None:
        return min(failures, key=lambda f: (f.is_consequence, f.time), default=None)
    same = [f for f in failures if (f.rank, f.node) == (verdict.rank, verdict.node)]
    code = next((f.code for f in same), verdict.exit_code or 1)
    error = verdict.error or next((f.error for f in same if f.error), "")
    return RecordedFailure(verdict.rank, verdict.node, error, code)
