"""The events of a run's journal: one record for each, with its writer, fields and units.

The table of ``docs/reference.md`` is made from them. An optional field that is None is not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from hpc_ddp.core.journal.vocabulary import Action, Cause, StopReason

LOGIN_NODE, BATCH_SCRIPT, SUPERVISOR = "login node", "batch script", "supervisor"
RANK_0, ANY_RANK = "rank 0", "any rank"


@dataclass(frozen=True)
class JournalEvent:
    """An event; `time` (unix seconds) and `attempt` are added when it is written."""

    event: ClassVar[str]
    writer: ClassVar[str]

    def to_fields(self) -> dict[str, Any]:
        """Return the fields as JSON values, without optional ones that are None."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {
            name: value
            for name, (value, default) in values.items()
            if value is not None or default is not None
        }


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
    """Slurm has taken the job."""

    event = "queued"
    writer = LOGIN_NODE
    job_id: str


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
    shell: Mapping[str, Any] | None = None
    backend: str | None = None
    pid: int | None = None
    began: float | None = None


@dataclass(frozen=True)
class PreflightEnded(JournalEvent):
    """The outcome of a preflight; `report` has the findings by node, `seconds` its duration."""

    event = "preflight"
    writer = BATCH_SCRIPT
    ok: bool
    bad_nodes: Sequence[str]
    hopeless: bool
    why: str
    report: Mapping[str, Any]
    seconds: float
    notice: str | None = None


@dataclass(frozen=True)
class FabricChosen(JournalEvent):
    """The interconnect of a node, its devices and trouble, and the variables set for it."""

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
    """Rank 0's process began, and its script called `start` (unix seconds)."""

    event = "worker"
    writer = RANK_0
    began: float | None
    called: float


@dataclass(frozen=True)
class CheckpointRestored(JournalEvent):
    """The run continues at `step`; damaged checkpoints were passed over; seconds."""

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
    """The first step of an attempt has ended; `hosts` are by rank."""

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

    def to_fields(self) -> dict[str, Any]:
        return {**self.values}


@dataclass(frozen=True)
class StepTiming(JournalEvent):
    """Mean seconds per step over the last `steps` steps: in all (rank 0), and by rank the work and
    the wait for data; the slowest rank and its node."""

    event = "ranks"
    writer = RANK_0
    step: int
    steps: int
    step_s: float
    data_s: Sequence[float]
    slowest: int
    node: str
    busy_s: Sequence[float] | None = None


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
    """All ranks have stopped after `step`, and saved."""

    event = "stopped"
    writer = RANK_0
    step: int
    reason: StopReason
    source: str | None = None


@dataclass(frozen=True)
class Finished(JournalEvent):
    """The training has ended; `results` are those of `run.finish`."""

    event = "finished"
    writer = RANK_0
    step: int
    results: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RankFailed(JournalEvent):
    """An exception has ended a rank."""

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
    progress: bool
    step: int | None
    bad_nodes: Sequence[str]
    rank: int | None = None
    node: str | None = None
    error: str | None = None


EVENTS: tuple[type[JournalEvent], ...] = tuple(JournalEvent.__subclasses__())
