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
from hpc_ddp.report.explain.node_records import RecordedFailure, read_ends, read_log_end
from hpc_ddp.report.status.run_state import RunState, state_of_job
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
    return isinstance(last, Started) and last.backend == "local"  # none for hpc-ddp


@dataclass(frozen=True)
class RunFacts:
    """All facts that an explanation is made from.

    Attributes
    ----------
    path, spec
        the run's folder, and the content of its ``job.json``, {} where that can't be read
    now
        the time at which the facts were read, in unix seconds
    is_executable
        whether the user may start something of the run
    problem
        the reason why its journal can't be read, or ''
    events, attempts
        the journal; the numbers of the attempts that have a folder
    job_id, record
        the job that counts now (None before the first), and Slurm's record of it (None without one)
    refusal, is_forgotten
        Slurm's last error for a record that was asked for, or ''; whether this error says that
        Slurm has no such job any more
    vain_text
        the starts that came to nothing since the newest attempt, in words, or ''
    cancelled, live
        whether the user has cancelled the run; whether a process of this machine plays it
    saved, library
        the step of the newest checkpoint on disk, None without one; the library that wrote it, or
        '' for hpc-ddp
    failure
        the failure that ended the newest attempt; None without one (see `_first_cause`)
    terminated
        the ranks, in order, that their supervisors ended since others failed
    rank_log, agent_log, job_log
        the ends of the logs of the failed rank, of its torchrun, and of the job
    hang_places
        after a hang: the line of the user's code where each rank stood, by rank
    tasks
        the facts of an array's tasks, by their index as text
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
    vain_text: str = ""
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

    @cached_property  # read once for each event
    def newest(self) -> int | None:
        """The number of the newest attempt, by its folder or its events; None before the first."""
        started = [event.attempt for event in self.select(Started)]
        return max([*self.attempts, *started], default=None)

    @property
    def verdict(self) -> VerdictGiven | None:
        """The newest attempt's verdict; None without one, and after a new submit of the run."""
        last = last_event(self.events, VerdictGiven)
        submits = self.select(Submitted)
        first_attempt = max((event.first_attempt for event in submits), default=0)  # of the last
        if last is None or last.attempt != self.newest or last.attempt < first_attempt:
            return None
        return last

    @property
    def job_state(self) -> RunState | None:
        """The state of the run by its live job; None where the job is over, or not known."""
        return state_of_job(self.record.state) if self.record else None

    def select(self, *kinds: type[E], attempt: int | None = None) -> list[E]:
        """Return the events of these kinds, by attempt and time: of one attempt, or (None) of
        all."""
        events: list[Any] = [event for kind in kinds for event in self._by_kind.get(kind, ())]
        if len(kinds) > 1:
            events.sort(key=lambda event: (event.attempt, event.time))
        return [event for event in events if attempt in (None, event.attempt)]

    @cached_property  # there may be a hundred thousand events, most of them metrics
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
        """Whether the run was last started without hpc-ddp (see `is_standalone`)."""
        return is_standalone(self.events)

    @property
    def again(self) -> str:
        """The command that continues the run; for a standalone script the advice to repeat its
        command."""
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
    """Return the facts of a run, and of the tasks of an array: read their folders, and query Slurm
    for their jobs. Tasks that are over by their journals are not asked for, except the first that
    did not finish. Facts that can't be read have their default; nothing is raised.

    `events` is the run's journal; None: it is read here, and briefly (`read_briefly`).
    """
    return _gather_one(run, _read_or_default(lambda: is_executable(run), False), events)


def _gather_one(
    run: RunFolder,
    can_start: bool,
    events: Sequence[JournalEvent] | None = None,
    is_part: bool = False,
) -> RunFacts:
    """Return the facts of a run, or of a task of an array; `events` as in `gather`. `can_start`:
    the user may start something of the run. With `is_part` Slurm isn't asked for a task that is
    over by its journal."""
    problem = ""
    try:
        events = read_briefly(run.journal_folder) if events is None else events
    except OSError as error:
        events, problem = (), f"{error.filename}: {error.strerror}"
    attempts = _read_or_default(run.attempts, list[AttemptFolder]())
    outputs = _read_or_default(run.outputs, list[Path]())
    facts = RunFacts(
        path=run.path,
        now=time.time(),
        is_executable=can_start,
        problem=problem,
        spec=read_json(run.job_json),
        events=events,
        attempts=[attempt.number for attempt in attempts],
        vain_text=run.vain_text,
        cancelled=_read_or_default(run.cancelled.exists, False),
        live=_has_live_process(events),
        saved=_read_or_default(lambda: _newest_step(run.checkpoints), None),
        library=_read_or_default(lambda: _library_of_newest(run.checkpoints), ""),
        job_log=read_log_end(outputs[-1]) if outputs else "",
        tasks=_gather_tasks(run, can_start),
    )
    jobs = _read_or_default(lambda: run.jobs(events), list[JobRef]())
    ended = _read_or_default(lambda: ended_jobs(run, events), list[JobRef]()) if is_part else []
    # Slurm isn't asked for a task that is finished, nor (`is_part`) for one whose job has ended.
    if (run.is_task and is_finished(events)) or (jobs and jobs[-1].is_among(ended)):
        facts = replace(facts, job_id=jobs[-1].id if jobs else None)
    else:
        facts = replace(facts, **_query_records(jobs))
    if attempts:
        facts = replace(facts, **_read_attempt_end(facts, attempts[-1]))
    return facts


def _gather_tasks(run: RunFolder, can_start: bool) -> dict[str, RunFacts]:
    """Return the facts of an array's tasks, by their index as text; {} for another run. `can_start`
    is as in `_gather_one`. Slurm is not asked for tasks that are over, of which there may be a
    thousand, except for the first that did not finish, which is explained in full."""
    tasks: dict[str, RunFacts] = {}
    is_explained = False
    for task in _read_or_default(run.tasks, list[RunFolder]()):
        facts = _gather_one(task, can_start, is_part=True)
        was_asked = facts.record is not None or facts.refusal
        if not (is_explained or was_asked or is_finished(facts.events)):
            facts, is_explained = _gather_one(task, can_start), True
        tasks[str(task.index)] = facts
    return tasks


def _read_or_default(call: Callable[[], T], default: T) -> T:
    """Return the result of `call`, which reads from disk or asks Slurm; `default` where it raises
    OSError, ValueError or HpcDdpError."""
    try:
        return call()
    except (OSError, ValueError, HpcDdpError):
        return default


def _has_live_process(events: Sequence[JournalEvent]) -> bool:
    """Return whether the process of the newest attempt runs on this machine."""
    started = last_event(events, Started)
    return started is not None and _read_or_default(lambda: process.is_live(started.process), False)


def _newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint with its final name in `folder`, the run's folder
    ``checkpoints``; None without one. Raise OSError where the folder can't be listed."""
    published = checkpoints.published(folder)
    return checkpoints.step_of(published[0]) if published else None


def _library_of_newest(folder: Path) -> str:
    """Return the name of the library that wrote the newest checkpoint in `folder`, the run's folder
    ``checkpoints``; '' for hpc-ddp, or without a checkpoint. Raise OSError or ValueError where the
    checkpoint's manifest can't be read."""
    for newest in checkpoints.published(folder)[:1]:
        # The format of hpc-ddp's own checkpoints is a number.
        name = checkpoints.read_manifest(newest).get("format")
        return name if isinstance(name, str) else ""
    return ""


def _query_records(jobs: Sequence[JobRef]) -> dict[str, Any]:
    """Ask Slurm for the last two jobs, and return fields of `RunFacts` on the job that counts: a
    job that runs (a chain's newest job may wait behind it), else the newest that Slurm knows, else
    the newest.

    `jobs` are the run's jobs, oldest first. The fields are ``job_id`` (None without jobs) and
    ``record`` (None without an answer); unless the job runs, also ``refusal`` and ``is_forgotten``.
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
    job_id = next(reversed(records), newest)  # the last that was put into the dict
    return {
        "job_id": job_id,
        "record": records.get(job_id or ""),
        "refusal": refusal,
        "is_forgotten": is_forgotten,
    }


def _read_attempt_end(facts: RunFacts, attempt: AttemptFolder) -> dict[str, Any]:
    """Return fields of `RunFacts` on the end of the newest attempt, `attempt`, from the records and
    logs that its nodes and ranks have left. A field that can't be read is empty."""
    nodes = _read_or_default(attempt.nodes, list[NodeFolder]())
    failures, hang_places = _read_or_default(
        lambda: read_ends(attempt), (list[RecordedFailure](), dict[int, str]())
    )
    # Failures from before the last start do not count: the workers were started again after them.
    workers = facts.select(WorkerStarted, attempt=attempt.number)
    began = max((event.time for event in workers), default=0)
    failures += [
        RecordedFailure(event.rank, event.node, event.error, time=event.time)
        for event in facts.select(RankFailed, attempt=attempt.number)
        if event.time > began
    ]
    failure = _first_cause(facts, failures)
    node = attempt.node(failure.node) if failure and _is_folder_name(failure.node) else None
    rank = failure.rank if failure else None
    # Without a failed node the reason may be in any node's log. `MOST_AGENT_LOGS` are enough: those
    # of a thousand nodes are alike.
    agent_logs = (
        [] if node else [read_log_end(n.agent_log)[-2000:] for n in nodes[:MOST_AGENT_LOGS]]
    )
    return {
        "failure": failure,
        "terminated": sorted({f.rank for f in failures if f.was_terminated and f.rank is not None}),
        "rank_log": read_log_end(node.rank_log(rank)) if node and rank is not None else "",
        "agent_log": read_log_end(node.agent_log) if node else "".join(agent_logs),
        "hang_places": hang_places,
    }


def _is_folder_name(node: str) -> bool:
    """Return whether a name of a node in the journal can be the name of a folder."""
    return bool(node) and not set(node) & {"/", "\0"}


def _first_cause(facts: RunFacts, failures: Sequence[RecordedFailure]) -> RecordedFailure | None:
    """Return the failure that ended the newest attempt: the one that the verdict names. Its exit
    code comes from `failures`, else from the verdict; its error from the verdict, else from
    `failures`. Where no verdict names a node, return the earliest of `failures` that is no
    consequence of another, else the earliest; None without any."""
    verdict = facts.verdict
    if verdict is None or verdict.node is None:
        return min(failures, key=lambda f: (f.is_consequence, f.time), default=None)
    same_rank = [f for f in failures if (f.rank, f.node) == (verdict.rank, verdict.node)]
    code = next((f.code for f in same_rank), verdict.exit_code or 1)
    error = verdict.error or next((f.error for f in same_rank if f.error), "")
    return RecordedFailure(verdict.rank, verdict.node, error, code)
