"""Stand-ins for the peers of a saver, and savers of a world of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from hpc_ddp.core import checkpoints
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint.manager import CheckpointManager
from hpc_ddp.training.checkpoint.rank_comparison import Digest, Inventory
from hpc_ddp.training.checkpoint.rank_part import Content
from hpc_ddp.training.checkpoint.save import Checkpoints
from hpc_ddp.training.checkpoint.storage import disk
from hpc_ddp.training.checkpoint.storage.index import Claim
from hpc_ddp.training.checkpoint.storage.layout import StoredShard, layout_of
from hpc_ddp.training.checkpoint.storage.resharding import Part, Reader
from hpc_ddp.training.checkpoint.storage.retention import Retention
from hpc_ddp.training.checkpoint.storage.shards import LocalShard, StagingBuffer
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.mesh import ParallelDims
from tests.raw_events import raw_events


class LoneRank:
    """The control group of one rank. `peers` are the answers of others, if there are some,
    `claims` what they are about to write, and `inventories` their tensors."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.peers: list[Any] = []
        self.claims: list[Any] = []
        self.inventories: list[Inventory] = []

    def from_first(self, value: Any) -> Any:
        return value

    def to_first(self, value: Any) -> list[Any]:
        if isinstance(value, Claim):
            return [value, *(self.claims or [value] * len(self.peers))]
        if isinstance(value, Inventory):
            return [value, *self.inventories]
        if isinstance(value, Digest):
            return [value, *(inventory.digest for inventory in self.inventories)]
        return [value, *self.peers]


def claim_run(root: Path) -> RunFolder:
    """Return a new run whose attempt 0 is live."""
    run = RunFolder(root / "name" / "run").make()
    run.claim_attempt({}, lambda identity: False)
    return run


def make_saver(
    run: RunFolder, keep: Retention | None = None, background: Any = None, attempt: int = 0
) -> Checkpoints:
    control, background = cast(Any, LoneRank()), cast(Any, background or LoneRank())
    journal = run.journal("rank-0")
    return Checkpoints(run, attempt, control, background, journal, keep or Retention(2))


Make = Callable[..., Checkpoints]


def buffer_of(*content: bytes, copy_s: float = 0.0, is_finite: bool = True) -> Any:
    """Return what holds these bytes, and was copied by a device in this time."""
    pieces = [StoredShard("x", "uint8", (n,), (0,), (n,), 0) for n in map(len, content) if n]
    return SimpleNamespace(
        bytes=content, pieces=pieces, wait=lambda: copy_s, is_finite=lambda names: is_finite
    )


def reader_of(files: Sequence[tuple[Path, list[StoredShard]]], rank: int | None = None) -> Reader:
    """Return a reader of what ranks have written, each into a file of its own: `files` by rank,
    with the places of their tensors; `rank` is the reader's."""
    layouts, coordinates = zip(*(layout_of(pieces) for _, pieces in files), strict=True)
    parts = [Part(path, 0, n, coordinates[n]) for n, (path, _) in enumerate(files)]
    return Reader(layouts, parts, () if rank is None else {rank})


def write_buffer(path: Path, parts: Mapping[str, LocalShard]) -> tuple[Path, list[StoredShard]]:
    """Write a rank's parts of tensors into a file; return it with their places."""
    buffer = StagingBuffer(CPU)
    buffer.fill(parts)
    path.write_bytes(b"".join(buffer.bytes))
    return path, buffer.pieces


def content_of(step: int, **values: Any) -> Content:
    fields: dict[str, Any] = {
        **{"facts": {"epoch": 1, "best": None}, "shared": {"tree": {"a": step}}},
        **{"rank_values": {}, "buffer": buffer_of(), "trained": set()},
        **{"inventory": lambda: Inventory(0, {}), "stall_s": 0.25},
    }
    return Content(step, **{**fields, **values})


def save_steps(saver: Checkpoints, *steps: int, **values: Any) -> list[bool]:
    settled = []
    for step in steps:
        saver.begin(content_of(step, **values))
        settled.append(saver.settle())
        saver.tidy()
    return settled


def checkpoint_names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def events_named(run: RunFolder, name: str) -> list[dict[str, Any]]:
    return [event for event in raw_events(run.path) if event["event"] == name]


def break_publishing(saver: Checkpoints, error: Exception | None) -> None:
    def fail(step: int) -> None:
        if error:
            raise error

    saver.before_publishing = fail


Finding = str | OSError | None


def stub_verification(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> list[str]:
    """Let verifications return these findings in turn; return the names of the verified folders."""
    answers, names = iter(findings), []

    def find_damage(folder: Path, rank: int, world_size: int) -> str | None:
        names.append(folder.name)
        assert (rank, world_size) == (0, 1)
        finding = next(answers)
        if isinstance(finding, OSError):
            raise finding
        return finding

    monkeypatch.setattr(checkpoints, "find_damage", find_damage)
    return names


def make_manager(
    saver: Checkpoints, position: Position | None = None, seed: int = 1
) -> CheckpointManager:
    return CheckpointManager(
        saver, position or Position(), [CPU], seed, ParallelDims(), only_finite=True
    )


def write_draft(folder: Path, step: int, attempt: int = 0, content: bytes = b"x" * 1000) -> Path:
    draft = disk.draft(folder, step, attempt)
    draft.mkdir(parents=True)
    facts = disk.write_file(draft / "state.pt", content)
    disk.write_manifest(draft, {"step": step}, {"state.pt": [facts]})
    return draft


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class ManyParameters(nn.Module):
    """Parameters of awkward shapes and types, a tied one, buffers, and a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.randn(0, 3))
        self.big = nn.Parameter(torch.randn(37, 5).t())
        self.short = nn.Parameter(torch.randn(3, 2).to(torch.bfloat16))
        self.row = nn.Parameter(torch.randn(1, 50))
        self.tied = self.row
        self.count: torch.Tensor
        self.register_buffer("count", torch.tensor(7))
        self.part = nn.Linear(3, 4)
