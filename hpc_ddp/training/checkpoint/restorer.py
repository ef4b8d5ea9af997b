"""Restoring a run together: every rank calls this, rank 0 decides for all."""

from __future__ import annotations

import errno
import io
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import DiskError, HpcDdpError
from hpc_ddp.core.file_io import patiently
from hpc_ddp.core.journal.events import CheckpointRestored
from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint import files as disk
from hpc_ddp.training.checkpoint.inventory import Inventory, find_fault, fit_together
from hpc_ddp.training.checkpoint.shards import Reader
from hpc_ddp.training.checkpoint.state import joined
from hpc_ddp.training.process.process_group import Control

T = TypeVar("T")


STATE = "state.pt"


@dataclass(frozen=True)
class Restored:
    """A checkpoint that verified. `owns` has what each of its ranks had of its own, by rank."""

    step: int
    shared: dict[str, Any]
    owns: list[dict[str, Any]]
    reader: Reader


def _damage_in(answers: list[str | HpcDdpError | None]) -> str | None:
    """Return the first damage that a rank reports; an error comes first, and is raised."""
    for answer in answers:
        if isinstance(answer, HpcDdpError):
            raise answer
    return next((answer for answer in answers if isinstance(answer, str)), None)


def _unreadable(folder: Path, error: OSError, rank: int = 0) -> DiskError:
    cure = "when the disk answers"
    if error.errno in (errno.EACCES, errno.EPERM):
        cure = f"with permission to read all of it: ls -l {folder}"
    return DiskError(
        f"{folder} can't be read on rank {rank}, and was waited for: {error.strerror or error}",
        hint=f"the checkpoint stays as it is: start the run again {cure}",
    )


def find_misfit(control: Control, inventory: Inventory) -> HpcDdpError:
    """Return on all ranks what keeps their tensors from fitting together."""
    inventories = control.to_first(inventory)
    fault: HpcDdpError = control.from_first(find_fault(inventories) if inventories else None)
    return fault


def open_checkpoint(
    folder: Path, rank: int = 0, world_size: int = 0
) -> tuple[dict[str, Any], dict[int, dict[str, Any]], Reader]:
    """Return what all ranks shared, what each had of its own, and the tensors; verify it first.

    Where ranks had tensors of their own (see `state.my_parts`), they are this rank's if as many
    ranks wrote it as there are now, and else rank 0's.

    Raises
    ------
    HpcDdpError
        another version of hpc-ddp has written it
    """
    manifest = checkpoints.read_manifest(folder)
    if (version := manifest.get("format")) != checkpoints.FORMAT:
        raise HpcDdpError(
            f"{folder} has format {version}; this hpc-ddp reads format {checkpoints.FORMAT}",
            hint="go on with the hpc-ddp that wrote it: <run>/lib has it",
        )
    names = [name for name in manifest["files"] if name.startswith("rank-")]
    owns = {record["rank"]: record for record in (_load(folder / name) for name in names)}
    data = [(folder / f"tensors-{rank}.bin", record["pieces"]) for rank, record in owns.items()]
    shared = _load(folder / STATE)
    for rank_of_stage in sorted(owns):
        if "tree" in owns[rank_of_stage]:
            shared["tree"] = joined(shared["tree"], owns[rank_of_stage].pop("tree"))
    return shared, owns, Reader(data, rank if len(owns) == world_size else None)


def _load(path: Path) -> dict[str, Any]:
    # On the CPU, and never pickled code.
    content = io.BytesIO(patiently(path.read_bytes))
    value: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
    return value


def print_note(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr may be closed: no reason to fail
        print(f"hpc-ddp: {text}", file=sys.stderr, flush=True)


class Restorer:
    """Opens the checkpoints of a run, as this attempt sees them."""

    def __init__(self, run: RunFolder, attempt: int, control: Control, journal: Journal) -> None:
        self._run, self._attempt = run, attempt
        self._control, self._journal = control, journal

    def restore(self) -> Restored | None:
        """Open the newest checkpoint that verifies; None for a run that has never had one.

        The ranks share the reading. A damaged one is named on stderr and in the journal, and set
        aside as `.bad-`.

        Raises
        ------
        HpcDdpError
            a disk does not answer for a minute; or the run has had checkpoints, and none is good
        """
        began = time.monotonic()
        names = self._from_first(self._find_names)
        if self._control.rank == 0:
            disk.clear_drafts(self._run.checkpoints)
        passed_over: list[str] = []
        chosen = None
        for folder in map(self._run.checkpoints.joinpath, names):
            damage = self._damage_of(folder)
            if damage is None:
                chosen = folder
                break
            passed_over.append(f"{folder.name}: {damage}")
            if self._control.rank == 0:
                self._set_aside(folder, damage)
        if self._control.rank == 0:
            self._report_restore(chosen, passed_over, time.monotonic() - began)
        if chosen is None:
            self._from_first(partial(self._refuse_step_0, passed_over))
            return None
        return self._open(chosen)

    def load(self, step: int) -> Restored:
        """Verify the checkpoint of a step and open it on the CPU.

        Raises
        ------
        HpcDdpError
            it is not there, or damaged, or can't be read
        """
        folder = self._run.checkpoints / f"step-{step}"
        names = self._from_first(self._find_names)
        damage = self._damage_of(folder) if folder.name in names else "it is not there"
        if damage:
            raise HpcDdpError(f"{folder}: {damage}", hint=f"hpc-ddp verify {self._run.path}")
        return self._open(folder)

    def _find_names(self) -> list[str]:
        """Return the names of what may be a checkpoint, newest first; on rank 0."""
        # A disk that is gone for a moment must not look like a run without checkpoints.
        folder = self._run.checkpoints
        patiently(folder.stat)
        return [path.name for path in patiently(partial(checkpoints.candidates, folder))]

    def _refuse_step_0(self, damaged: list[str]) -> None:
        """Raise an error on a run that has had checkpoints; on rank 0, which has no good one."""
        if lost := damaged or checkpoints.lost(self._run):
            raise HpcDdpError(
                f"{self._run.path} has no good checkpoint any more, and does not begin at step 0"
                f" by itself: {'; '.join(lost)}",
                hint="to begin at step 0, and keep what there is:"
                f" {checkpoints.fresh_command(self._run)}",
            )

    def _from_first(self, act: Callable[[], T]) -> T:
        """Return on all ranks what `act` returns on rank 0; its errors are raised on all."""
        answer: Any = None
        if self._control.rank == 0:
            try:
                answer = act()
            except HpcDdpError as error:
                answer = error
            except OSError as error:
                answer = _unreadable(self._run.checkpoints, error)
        answer = self._control.from_first(answer)
        if isinstance(answer, HpcDdpError):
            raise answer
        result: T = answer
        return result

    def _open(self, folder: Path) -> Restored:
        rank, world_size = self._control.rank, self._control.world_size
        try:
            shared, owns, reader = open_checkpoint(folder, rank, world_size)
        except OSError as error:
            raise _unreadable(folder, error, rank) from error
        every = [owns[number] for number in sorted(owns)]
        return Restored(checkpoints.step_of(folder), shared, every, reader)

    def _damage_of(self, folder: Path) -> str | None:
        """Return what is damaged in a checkpoint, None where nothing is; the same on all ranks."""
        # Asked again after damage, since it may have been the disk's and not the file's.
        return self._find_damage(folder) and self._find_damage(folder)

    def _find_damage(self, folder: Path) -> str | None:
        """Let the ranks verify a checkpoint together; all get the same answer, or error."""
        rank, world_size = self._control.rank, self._control.world_size
        answer: str | HpcDdpError | None
        try:
            answer = patiently(partial(checkpoints.find_damage, folder, rank, world_size))
        except OSError as error:
            answer = _unreadable(folder, error, rank)
        answers = self._control.to_first(answer)
        return self._from_first(partial(_damage_in, answers))

    def _set_aside(self, folder: Path, why: str) -> None:
        try:
            target = disk.set_aside(folder, "bad", self._attempt).name
        except OSError as error:  # a folder that can be read only: the next start passes it over
            target = f"{folder.name}: {error}"
        print_note(f"PASSED OVER the checkpoint {folder.name}: {why}; kept as {target}")

    def _report_restore(self, chosen: Path | None, passed_over: list[str], took: float) -> None:
        step = checkpoints.step_of(chosen) if chosen else 0
        if chosen or passed_over:
            self._journal.write(CheckpointRestored(step, passed_over, round(took, 3)))
        if chosen:
            print_note(f"going on from step {step} of {self._run.path}")

    def non_finite_error(self, step: int | str) -> HpcDdpError:
        """Return the error that ends a run whose weights can't be gone on from."""
        newest_first = checkpoints.candidates(self._run.checkpoints)
        last = newest_first[0].name if newest_first else "none"
        return HpcDdpError(
            "the weights have NaN or infinity in them; it came at or before step"
            f" {step}; last checkpoint: {last}",
            hint="lower the learning rate, or clip: run.update(optimizer, clip_norm=1.0)",
        )

    def warn(self, text: str) -> None:
        """Print a warning, on rank 0."""
        if self._control.rank == 0:
            print_note(text)

    def agree(self, value: float) -> float:
        """Return rank 0's value on every rank."""
        agreed: float = self._control.from_first(value)
        return agreed

    def check(self, inventory: Inventory) -> None:
        """Refuse, on all ranks, tensors that would not make a whole; called before the training.

        Raises
        ------
        HpcDdpError
            names a tensor that is sharded otherwise on some rank, or that a rank lacks
        """
        digests = self._control.to_first(inventory.digest)
        if not self._control.from_first(self._control.rank != 0 or fit_together(digests)):
            raise find_misfit(self._control, inventory)
