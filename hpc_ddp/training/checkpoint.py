"""Saving and restoring a run together: every rank calls these, rank 0 decides for all."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Journal
from hpc_ddp.training import storage
from hpc_ddp.training.control import Control
from hpc_ddp.training.order import Position
from hpc_ddp.training.storage import FileFacts

STATE = "state.pt"
TRIES = 3  # failed saves in a row that end the run
KEEP = 3

_SAVED, _FAILED, _SUPERSEDED = "saved", "failed", "superseded"


class SupersededError(HpcDdpError):
    """A later attempt of this run has started: this one must not touch the run any more."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that verified. `rng` is None for a rank that did not exist when it was made."""

    position: Position
    facts: dict[str, Any]
    objects: dict[str, Any]
    rng: dict[str, Any] | None


class Checkpoints:
    """The checkpoints of a run, as this attempt sees them."""

    def __init__(self, run: RunFolder, attempt: int, control: Control, journal: Journal) -> None:
        self._run, self._attempt = run, attempt
        self._control, self._journal = control, journal
        self._failures = 0
        self.slowest_save_s = 0.0

    @property
    def _first(self) -> bool:
        return self._control.rank == 0

    def save(
        self,
        position: Position,
        facts: dict[str, Any],
        objects: dict[str, Any],
        rng: dict[str, Any],
    ) -> bool:
        """Write a checkpoint and make it durable; all ranks call it and get the same answer.

        `objects` (state by name) are written by rank 0, `rng` by each rank. Returns False,
        after a warning, when it failed and is worth another try later.

        Raises
        ------
        HpcDdpError
            it failed for the third time in a row
        SupersededError
            a later attempt has started; nothing was published
        """
        began = time.monotonic()
        outcome, detail = self._save_together(position, facts, objects, rng)
        took = time.monotonic() - began
        if outcome == _SUPERSEDED:
            raise SupersededError(
                f"attempt {self._attempt} of {self._run.path} has been superseded by a later one"
                " and leaves the run alone"
            )
        if outcome == _FAILED:
            self._failed(position.step, detail)
            return False
        self._failures = 0
        self.slowest_save_s = max(self.slowest_save_s, took)
        if self._first:
            write_s, size = detail
            self._journal.write(
                "checkpoint",
                step=position.step,
                stall_s=round(took, 4),
                write_s=round(write_s, 4),
                bytes=size,
            )
        return True

    def _save_together(
        self,
        position: Position,
        facts: dict[str, Any],
        objects: dict[str, Any],
        rng: dict[str, Any],
    ) -> tuple[str, Any]:
        """Write this rank's files and let rank 0 judge; return its outcome and details."""
        began = time.monotonic()
        made = storage.draft(self._run.checkpoints, position.step, self._attempt)
        contents: dict[str, Any] = {f"rng-{self._control.rank}.pt": rng}
        if self._first:
            contents[STATE] = {"position": asdict(position), "facts": facts, "objects": objects}
        answers = self._control.to_first(_write(made, contents))
        verdict: tuple[str, Any] | None = None
        if self._first:
            verdict = self._judge(made, position, answers, began)
        outcome: tuple[str, Any] = self._control.from_first(verdict)
        return outcome

    def _judge(
        self,
        made: Path,
        position: Position,
        answers: list[dict[str, FileFacts] | str],
        began: float,
    ) -> tuple[str, Any]:
        """On rank 0: complete and publish a draft, or remove it."""
        files: dict[str, FileFacts] = {}
        for rank, answer in enumerate(answers):
            if isinstance(answer, str):
                storage.remove(made)
                return _FAILED, f"rank {rank}: {answer}"
            files |= answer
        facts = {"format": 1, **asdict(position), "world_size": self._control.world_size}
        try:
            storage.write_manifest(made, facts, files)
            # Looked at as late as can be: from the rename on, a successor would see it.
            if not self._run.is_newest(self._attempt):
                storage.remove(made)
                return _SUPERSEDED, None
            storage.publish(made, self._attempt)
        except OSError as error:
            storage.remove(made)
            return _FAILED, f"rank 0: {error}"
        storage.prune(self._run.checkpoints, KEEP)
        return _SAVED, (time.monotonic() - began, sum(each.size for each in files.values()))

    def _failed(self, step: int, why: str) -> None:
        self._failures += 1
        if self._first:
            self._journal.write("save_failed", step=step, error=why)
            _say(f"the checkpoint of step {step} could not be saved ({why}); training goes on")
        if self._failures >= TRIES:
            raise HpcDdpError(
                f"{TRIES} saves in a row failed in {self._run.checkpoints}: {why}",
                hint=f"look for free space and quota: df -h {self._run.checkpoints}",
            )

    def restore(self) -> Restored | None:
        """Load the newest checkpoint that verifies, onto the CPU; None when there is none.

        Those passed over are named on stderr and in the journal, and set aside as `.bad-`.
        """
        began = time.monotonic()
        passed_over: list[str] = []
        found: tuple[str, int] | None = self._control.from_first(
            self._choose(passed_over) if self._first else None
        )
        if found is None:
            if passed_over:
                self._journal.write("restored", step=0, passed_over=passed_over)
            return None
        name, has_rng = found[0], self._control.rank < found[1]
        folder = self._run.checkpoints / name
        state = _load(folder / STATE)
        rng = _load(folder / f"rng-{self._control.rank}.pt") if has_rng else None
        if self._first:
            self._journal.write(
                "restored",
                step=storage.step_of(folder),
                passed_over=passed_over,
                restore_s=round(time.monotonic() - began, 3),
            )
        return Restored(Position(**state["position"]), state["facts"], state["objects"], rng)

    def _choose(self, passed_over: list[str]) -> tuple[str, int] | None:
        """On rank 0: find the newest good checkpoint; return its name and number of ranks."""
        storage.clear_drafts(self._run.checkpoints, self._attempt)
        chosen = None
        for folder in storage.candidates(self._run.checkpoints):
            why = storage.verify(folder)
            if why is None:
                chosen = folder
                break
            passed_over.append(f"{folder.name}: {why}")
            kept = storage.set_aside(folder, "bad", self._attempt)
            _say(f"PASSED OVER the checkpoint {folder.name}: {why}; kept as {kept.name}")
        if passed_over and chosen is None:
            _say("NO checkpoint of this run is good any more: it starts again from step 0")
        if chosen is None:
            return None
        _say(f"going on from step {storage.step_of(chosen)} of {self._run.path}")
        return chosen.name, storage.read_manifest(chosen)["world_size"]


def _write(folder: Path, contents: dict[str, Any]) -> dict[str, FileFacts] | str:
    """Write this rank's files of a draft; return what goes into the manifest, or the error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {name: _save(folder / name, value) for name, value in contents.items()}
    except OSError as error:
        return str(error)


def _save(path: Path, value: dict[str, Any]) -> FileFacts:
    return storage.write_file(path, lambda file: torch.save(value, file))


def _load(path: Path) -> dict[str, Any]:
    # On the CPU, and never pickled code: from there each object moves its own part.
    value: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return value


def _say(text: str) -> None:
    print(f"hpc-ddp: {text}", file=sys.stderr, flush=True)
