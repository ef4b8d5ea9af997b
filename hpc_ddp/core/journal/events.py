"""The events of a run's journal: one record for each, with its writer, fields and units.

The table of ``docs/reference.md`` is made from them. An optional field that is None is not written.
Reading is lenient, since a line may be another version's or damaged: see
`parsing.parse_event`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar

from hpc_ddp.core.journal.enums import Action, Bound, Cause, EndKind, StopReason
from hpc_ddp.core.journal.fields import checked, read_fields, to_number

LOGIN_NODE, BATCH_SCRIPT, SUPERVISOR = "login node", "batch script", "supervisor"
RANK_0, ANY_RANK = "rank 0", "any rank"
HEAD = ("time", "event", "attempt")  # the fields of each line


@dataclass(frozen=True)
class JournalEvent:
    """An event; the journal sets `time` (unix seconds) and `attempt` when it writes the event."""

    event: ClassVar[str]  # the name of its kind in a line
    writer: ClassVar[str]  # the process that writes it
    time: float = field(default=0.0, kw_only=True)
    attempt: int = field(default=0, kw_only=True)

    @classmethod
    @cache  # read for each line of a journal
    def own_fields(cls) -> tuple[Field[Any], ...]:
        """Return the fields of this kind of event, without those that all events have."""
        return tuple(field for field in fields(cls) if field.name not in ("time", "attempt"))

    def to_fields(self) -> dict[str, Any]:
        """Return the event's own fields as JSON values, without optional ones that are None."""
        return {
            declared.name: getattr(self, declared.name)
            for declared in self.own_fields()
            if getattr(self, declared.name) is not None or declared.default is not None
        }

    def to_line(self) -> dict[str, Any]:
        """Return the event as the JSON object of a line of the journal."""
        return {"time": self.time, "event": self.event, "attempt": self.attempt, **self.to_fields()}

    @classmethod
    def read_fields(cls, line: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record's arguments from a line's JSON object; raise ValueError for damage."""
        return read_fields(cls.own_fields(), line)


@dataclass(frozen=True)
class Submitted(JournalEvent):
    """A submit; `first_attempt` is the number of the attempt that follows."""

    event = "submitted"
    writer = LOGIN_NODE
    first_attempt: int
    backend: str | None = None
    script: str | None = None


@dataclass(frozen=True)
class Queued(JournalEvent):
    """Slurm has taken the job; the `cluster` is absent where Slurm did not name it."""

    event = "queued"
    writer = LOGIN_NODE
    job_id: str
    cluster: str | None = None


@dataclass(frozen=True)
class Dismissed(JournalEvent):
    """The user has said by ``--force`` that a job is over for which Slurm can't be asked."""

    event = "dismissed"
    writer = LOGIN_NODE
    job_id: str
    cluster: str | None = None


@dataclass(frozen=True)
class Cancelled(JournalEvent):
    """The user has cancelled the run."""

    event = "cancelled"
    writer = LOGIN_NODE


@dataclass(frozen=True)
class Fresh(JournalEvent):
    """The attempt `first_attempt` is to begin at step 0 (``--fresh``)."""

    event = "fresh"
    writer = LOGIN_NODE
    first_attempt: int


@dataclass(frozen=True)
class Rerun(JournalEvent):
    """The run is a rerun of the run in the folder `of`."""

    event = "rerun"
    writer = LOGIN_NODE
    of: str


@dataclass(frozen=True)
class Started(JournalEvent):
    """An attempt has begun; `restarts` is Slurm's count, `pid` and `began` are of a local run."""

    event = "started"
    writer = BATCH_SCRIPT
    host: str
    nodes: Sequence[str] | None = None
    cluster: str | None = None
    job_id: str | None = None
    restarts: int | None = None
    shell: Mapping[str, Any] | None = None  # the batch shell, as `process.identity` returns it
    backend: str | None = None
    pid: int | None = None
    began: str | None = None

    @property
    def process(self) -> dict[str, Any]:
        """The identity of a local run's process, as `hpc_ddp.core.process.is_live` takes it."""
        return {"host": self.host, "pid": self.pid, "began": self.began}


@dataclass(frozen=True)
class PreflightEnded(JournalEvent):
    """The outcome of a preflight; `report` has odd nodes and a few others, `summary` all nodes."""

    event = "preflight"
    writer = BATCH_SCRIPT
    ok: bool
    bad_nodes: Sequence[str]
    hopeless: bool  # other nodes would fail alike
    why: str
    report: Mapping[str, Any]
    seconds: float
    notice: str | None = None  # by which it was ended early
    summary: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FabricChosen(JournalEvent):
    """A node's interconnect, its cards, what keeps NCCL from them, and the variables set for it."""

    event = "fabric"
    writer = SUPERVISOR
    node: str
    name: str
    cards: Sequence[str]
    trouble: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class NoticeGiven(JournalEvent):
    """The workers of a node got a notice; `source` is a `NoticeSource` or a signal's name."""

    event = "notice"
    writer = SUPERVISOR
    source: str


@dataclass(frozen=True)
class WorkerStarted(JournalEvent):
    """Unix seconds: rank 0's process began, its fork server imported, its script called `start`."""

    event = "worker"
    writer = RANK_0
    began: float | None
    called: float
    imports_began: float | None = None
    imports_ended: float | None = None


@dataclass(frozen=True)
class CheckpointRestored(JournalEvent):
    """The run goes on at `step`, read in `restore_s` s; the checkpoints `passed_over` were
    damaged."""

    event = "restored"
    writer = RANK_0
    step: int
    passed_over: Sequence[str]
    restore_s: float


@dataclass(frozen=True)
class TrainingBegun(JournalEvent):
    """The loop begins at `step`."""

    event = "training"
    writer = RANK_0
    step: int


@dataclass(frozen=True)
class FirstStep(JournalEvent):
    """The first step of an attempt has ended; `hosts` are the names of its nodes, sorted."""

    event = "first_step"
    writer = RANK_0
    step: int
    world_size: int
    hosts: Sequence[str]


@dataclass(frozen=True)
class MetricsLine(JournalEvent):
    """Rank 0's values: `step`, `total_steps`, `epoch`, the script's own, `samples_per_s`, `mfu`."""

    event = "metrics"
    writer = RANK_0
    values: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The step, 0 without one."""
        return int(self.values.get("step") or 0)

    @property
    def total_steps(self) -> int | None:
        """The number of all steps, None without one."""
        total = self.number("total_steps")
        return None if total is None else int(total)

    def number(self, name: str) -> float | None:
        """Return the value of this name as a float; None where it is missing or no number."""
        return to_number(self.values.get(name))

    def to_fields(self) -> dict[str, Any]:
        return {**self.values}

    @classmethod
    def read_fields(cls, line: Mapping[str, Any]) -> dict[str, Any]:
        """Return the line's ``values``; raise ValueError for a step that is no whole number."""
        values = {name: entry for name, entry in line.items() if name not in HEAD}
        for name in ("step", "total_steps"):
            if values.get(name) is not None:
                checked(values[name], "int")
        return {"values": values}


@dataclass(frozen=True)
class StepTiming(JournalEvent):
    """Mean seconds per step over `steps` steps: in all (rank 0), and of the slowest `ranks` the
    wait for data and the work; quartiles of both over all ranks; the slowest rank, and its node."""

    event = "ranks"
    writer = RANK_0
    step: int
    steps: int
    step_s: float
    ranks: Sequence[int]
    data_s: Sequence[float]
    data_quartiles_s: Sequence[float]
    slowest: int
    node: str
    busy_s: Sequence[float] | None = None
    busy_quartiles_s: Sequence[float] | None = None


@dataclass(frozen=True)
class CheckpointSaved(JournalEvent):
    """A checkpoint is durable: seconds that the training waited, seconds to write, bytes."""

    event = "checkpoint"
    writer = RANK_0
    step: int
    stall_s: float
    write_s: float
    bytes: int


@dataclass(frozen=True)
class SaveFailed(JournalEvent):
    """A checkpoint could not be written."""

    event = "save_failed"
    writer = RANK_0
    step: int
    error: str


@dataclass(frozen=True)
class Stopped(JournalEvent):
    """All ranks have stopped after `step`, and saved a checkpoint."""

    event = "stopped"
    writer = RANK_0
    step: int
    reason: StopReason
    source: str | None = None


@dataclass(frozen=True)
class Finished(JournalEvent):
    """The training has ended; with `at_exit`, or `within` a worker's script, exit codes count."""

    event = "finished"
    writer = RANK_0
    step: int
    results: Mapping[str, Any] | None = None
    at_exit: bool | None = None
    within: bool | None = None


@dataclass(frozen=True)
class TeardownBegun(JournalEvent):
    """The user's lines after an attempt begin; the verdict, which comes last, will have `cause`."""

    event = "teardown"
    writer = BATCH_SCRIPT
    cause: Cause


@dataclass(frozen=True)
class RankFailed(JournalEvent):
    """An exception has ended a rank, or its script has left the loop too early (`EARLY_EXIT`)."""

    event = "failed"
    writer = ANY_RANK
    rank: int
    node: str
    step: int | None
    error: str
    traceback: str


@dataclass(frozen=True)
class VerdictGiven(JournalEvent):
    """How an attempt has ended, and what follows; `rank`, `node`, `error`: the first failure."""

    event = "verdict"
    writer = BATCH_SCRIPT
    cause: Cause
    action: Action
    why: str
    exit_code: int
    progress: bool  # the attempt has saved
    step: int | None
    bad_nodes: Sequence[str]
    then: str = ""  # what follows, for users
    rank: int | None = None
    node: str | None = None
    error: str | None = None
    kind: EndKind | None = None
    bound: Bound | None = None
    why_not: str | None = None  # of a further attempt: the last part of `why`


@dataclass(frozen=True)
class DrillRecord(JournalEvent):
    """In the journal of a drill: digests of a rank's state at one moment (`at` is ``start``,
    ``step``, ``epoch`` or ``end``), by kind and name, and the exact values of `run.step`."""

    event = "record"
    writer = ANY_RANK
    rank: int
    at: str
    step: int
    epoch: int
    samples: int
    used: Mapping[str, str]
    state: Mapping[str, str]
    values: Mapping[str, Any]
    sizes: Mapping[str, Any]


EVENTS: tuple[type[JournalEvent], ...] = tuple(JournalEvent.__subclasses__())
_WITH_STEP = (
    CheckpointRestored, TrainingBegun, FirstStep, MetricsLine, StepTiming, CheckpointSaved,
    SaveFailed, Stopped, Finished, RankFailed, VerdictGiven,
)  # fmt: skip


def step_of(event: JournalEvent | None) -> int | None:
    """Return the step of an event; None for no event, and for one without a step."""
    return event.step if isinstance(event, _WITH_STEP) else None
