"""The facts about an attempt on which its verdict is based. Pure: no Slurm, no disk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import END_OF_TIME
from hpc_ddp.core.journal.events import (
    CheckpointRestored,
    FirstStep,
    JournalEvent,
    NoticeGiven,
    PreflightEnded,
    Started,
    Stopped,
    VerdictGiven,
    WorkerStarted,
)
from hpc_ddp.core.journal.journal import attempts_with_progress, last_event, last_step
from hpc_ddp.node.outcome.first_failure import Failure, find_failure, read_failures
from hpc_ddp.slurm_text import Job

E = TypeVar("E", bound=JournalEvent)
EARLY_S = 600.0  # after its start a plain script's errors may be those of a node, or of a disk


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
    def attempts_with_steps(self) -> set[int]:
        """The numbers of the attempts since the last submit that have done a step."""
        return {event.attempt for event in self.events if isinstance(event, FirstStep)}

    @property
    def worked_attempts(self) -> set[int]:
        """The numbers of the attempts since the last submit whose start has worked: those with
        steps; of a plain script, whose steps are not known, those with a failure or verdict more
        than `EARLY_S` after their start. Raise as `failure`."""
        if not self.is_plain:
            return self.attempts_with_steps
        ends = {event.attempt: event.time for event in self.verdicts}
        if self.failure:
            ends[self.attempt] = self.failure.time
        starts = (event for event in self.events if isinstance(event, Started))
        return {s.attempt for s in starts if ends.get(s.attempt, s.time) > s.time + EARLY_S}

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
        """The node of `failure`, in a list, if that is an error of the machine that no other node
        has had: in this attempt, or, for a job of one node, the same error in the attempt before.
        Else [], and for a job of one node on this machine, without Slurm. Raises as `failure`."""
        failure, last = self.failure, next(reversed(self.verdicts), None)
        nodes = {failed.node for failed in self._failures if failed.is_of_machine}
        if failure is None or nodes != {failure.node}:
            return []
        if len(self.nodes) == 1:  # no peer has shown that the script runs elsewhere
            started = self.find_event(Started)
            is_local = started is not None and started.pid is not None
            is_of_script = last and last.error == failure.error and last.node != failure.node
            if is_local or is_of_script:
                return []
        return [*nodes]

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


def silent_nodes(
    spec: JobSpec, nodes: Sequence[str], records: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the `nodes`, sorted, of which not all tasks have recorded their end in `records`.
    Records with ``left`` don't count: their nodes have left an elastic job. How many tasks a node
    has had is in its records: the user may have edited the batch script. Raise KeyError for a
    record without ``node``."""
    counted = [record for record in records if not record.get("left")]
    records_of = Counter(record["node"] for record in counted)
    tasks = {record["node"]: record.get("tasks", spec.tasks_per_node) for record in counted}
    return sorted(node for node in nodes if records_of[node] < tasks.get(node, 1))


def keep_few(silent: Sequence[str], nodes: Sequence[str]) -> Sequence[str]:
    """Return `silent`, the silent nodes among an attempt's `nodes`, where they are few: one, or at
    most a tenth. Else [], since the cause may then be anywhere."""
    return silent if len(silent) <= max(1, len(nodes) // 10) else []
