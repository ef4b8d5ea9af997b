"""Restoring a run together: every rank calls this, rank 0 decides for all."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpc_ddp.core import checkpoints
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import DiskError, HpcDdpError
from hpc_ddp.core.file_io import patiently
from hpc_ddp.core.journal.events import CheckpointRestored
from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint import optimizer_state, put_back
from hpc_ddp.training.checkpoint.rank_comparison import digest, start_checksums
from hpc_ddp.training.checkpoint.state import collect, unwrap
from hpc_ddp.training.checkpoint.storage import disk
from hpc_ddp.training.checkpoint.storage.index import Index, read_index, read_values, reader_of
from hpc_ddp.training.models.dtensor import is_sharded
from hpc_ddp.training.models.trained import TrainedParameters
from hpc_ddp.training.process.control import Control
from hpc_ddp.training.process.process_group import on_first


class Restored:
    """A checkpoint that is open, on the CPU; tensors are read later, by its reader.

    Where ranks had tensors of their own (see `state.my_parts`), the reader has those of `rank` if
    `world_size` ranks wrote it; else (`is_resized`) the buffers of the first rank of a stage, and
    no others.
    """

    def __init__(self, folder: Path, index: Index, rank: int, world_size: int) -> None:
        self._folder, self._rank = folder, rank
        self.step, self.index = checkpoints.step_of(folder), index
        self.is_resized = index.world_size != world_size
        self.reader = reader_of(folder, index, None if self.is_resized else rank)

    def values_of(self, rank: int) -> dict[str, Any]:
        """Return the plain values that a rank had of its own; raise DiskError if they can't be
        read."""
        with reading(self._folder, self._rank):
            return read_values(self._folder, self.index.parts[rank])


class Loaded:
    """A checkpoint that has been loaded into objects, of which lines of the script that had run
    before it change models and optimizers once more: `put_back` undoes that."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        tree: Mapping[str, Any],
        checkpoint: Restored,
        trained: TrainedParameters,
        added: Sequence[str],
    ) -> None:
        """`objects`, `tree` and `added` as `put_back.put_back` has them; `trained` knows the flags
        that the script has made."""
        kinds = (torch.nn.Module, torch.optim.Optimizer)
        self._objects = {n: o for n, o in objects.items() if isinstance(unwrap(o), kinds)}
        self._tree, self._checkpoint = tree, checkpoint
        self._trained, self._added = trained, added
        self._sums = self._sum_up()

    def put_back(self, is_stage: bool, accepts_settings: bool) -> list[str]:
        """Load anew, where tensors are others than the checkpoint's: models, and optimizers, but
        with `accepts_settings` none of which only a setting has changed. Put back all flags of
        models. Return a line for each object in which something was otherwise. `is_stage` and
        errors as `put_back.put_back` has them; no collective."""
        with torch.inference_mode(False), torch.no_grad():  # a look may be in another mode
            changed, modules = self._put_tensors_back(is_stage, accepts_settings)
        lines = [
            f"{name}: its {'weights are' if name in modules else 'state is'} as in the checkpoint"
            " again: lines behind run.track, between two loops, or at the top of an epoch, have"
            " changed them a second time"
            for name in sorted(changed)
        ]
        return lines + put_back.put_flags_back(modules, self._tree, self._trained)

    def _put_tensors_back(
        self, is_stage: bool, accepts_settings: bool
    ) -> tuple[set[str], dict[str, Any]]:
        """Load anew as `put_back` does; return the names of what was otherwise, and all models."""
        sums, reader = self._sum_up(), self._checkpoint.reader
        modules = {n: o for n, o in self._objects.items() if isinstance(unwrap(o), torch.nn.Module)}
        changed = {
            place.partition(".")[0]
            for place in sums.keys() | self._sums.keys()  # one of an optimizer may be gone
            if self._sums.get(place) != sums.get(place)
            and not (accepts_settings and optimizer_state.is_setting(place))
        }
        # An optimizer's tensors have the names of the models' parameters.
        objects = self._objects if changed - modules.keys() else {n: modules[n] for n in changed}
        tree = {name: self._tree[name] for name in objects}
        reader.sharing = None
        put_back.put_back(objects, tree, reader, self._checkpoint.step, is_stage, self._added)
        sums = self._sum_up() if changed else sums
        of_models = {place for place in sums if place.partition(".")[0] in modules}
        self._sums |= {place: sums[place] for place in of_models}  # perhaps of another type
        return changed, modules

    def _sum_up(self) -> dict[str, int]:
        """Return digests of this rank's tensors that the checkpoint has, by their places."""
        tensors = {}
        local: Any  # a DTensor, perhaps
        for place, local in collect(self._objects, trained=self._trained).tensors.items():
            if place in self._checkpoint.reader:
                tensors[place] = local.to_local() if is_sharded(local) else local
        return start_checksums(tensors, digest)()


def _damage_in(answers: list[str | HpcDdpError | None]) -> str | None:
    """Return the first damage that a rank reports, None without any; raise a rank's error before
    that."""
    for answer in answers:
        if isinstance(answer, HpcDdpError):
            raise answer
    return next((answer for answer in answers if isinstance(answer, str)), None)


@contextmanager
def reading(folder: Path, rank: int = 0) -> Iterator[None]:
    """Raise a DiskError that names the folder and the rank in place of an OSError inside the
    block."""
    try:
        yield
    except OSError as error:
        cure = "when the disk answers"
        if error.errno in (errno.EACCES, errno.EPERM):
            cure = f"with permission to read all of it: ls -l {folder}"
        raise DiskError(
            f"{folder} can't be read on rank {rank}, and was waited for: {error.strerror or error}",
            hint=f"the checkpoint stays as it is: start the run again {cure}",
        ) from error


def open_checkpoint(folder: Path) -> Restored:
    """Open a checkpoint that has been verified, by this process alone, as if another number of
    ranks had written it: without what ranks had of their own. Raises as `read_index`."""
    return Restored(folder, read_index(folder), rank=0, world_size=0)


def _read_index(folder: Path) -> Index:
    """Return `read_index` on rank 0, for whose answer the others wait: DiskError for OSError,
    HpcDdpError for whatever else is wrong with the files."""
    with reading(folder):
        try:
            return read_index(folder)
        except (HpcDdpError, OSError):
            raise
        except Exception as error:  # whatever torch makes of such a file; the others wait
            raise HpcDdpError(f"{folder} can't be opened: {error!r}") from error


class Restorer:
    """Opens the checkpoints of a run, as this attempt sees them.

    Its public methods are collectives: every rank must call them, and gets the same checkpoint.
    Ranks judge it together, and raise the same error; then each opens it, and an error of that may
    be one rank's alone. RuntimeError is raised if a peer is gone.
    """

    def __init__(self, run: RunFolder, attempt: int, control: Control, journal: Journal) -> None:
        self._run, self._attempt = run, attempt
        self.control, self._journal = control, journal

    def restore(self) -> Restored | None:
        """Open the newest checkpoint that verifies; None for a run that has never had one, or none
        since ``--fresh``.

        The ranks share the reading. Rank 0 sets a damaged one aside as `.bad-`, names it on stderr
        and in the journal, removes half-written ones, and prints and journals the step.

        Raises
        ------
        HpcDdpError
            as `find_newest`; or it can't be opened, as one of another version of hpc-ddp
        """
        newest = self.find_newest()
        return None if newest is None else self._open(newest)

    def find_newest(self) -> Path | None:
        """Return the newest checkpoint that verifies, as `restore` does, without opening it.

        Raises
        ------
        HpcDdpError
            a disk does not answer for a minute; or the run has had checkpoints, and none is good
        """
        began = time.monotonic()
        names = on_first(self.control, self._find_names)
        if self.control.rank == 0:
            disk.clear_drafts(self._run.checkpoints)
        passed_over: list[str] = []
        chosen = None
        for folder in map(self._run.checkpoints.joinpath, names):
            damage = self._damage_of(folder)
            if damage is None:
                chosen = folder
                break
            passed_over.append(f"{folder.name}: {damage}")
            if self.control.rank == 0:
                self._set_aside(folder, damage)
        if self.control.rank == 0:
            self._report_restore(chosen, passed_over, time.monotonic() - began)
        if chosen is None:
            on_first(self.control, partial(self._refuse_step_0, passed_over))
        return chosen

    def load(self, step: int) -> Restored:
        """Verify the checkpoint of a step and open it on the CPU; a damaged one stays in its place.

        Raises
        ------
        HpcDdpError
            it is not there, or damaged, or can't be read, or is another version's
        """
        folder = self._run.checkpoints / f"step-{step}"
        names = on_first(self.control, self._find_names)
        damage = self._damage_of(folder) if folder.name in names else "it is not there"
        if damage:
            raise HpcDdpError(f"{folder}: {damage}", hint=f"hpc-ddp verify {self._run.quoted}")
        return self._open(folder)

    def _find_names(self) -> list[str]:
        """On rank 0: return the names of what may be a checkpoint, newest first.

        Raise DiskError if the folder can't be listed for a minute.
        """
        # A disk that is gone for a moment must not look like a run without checkpoints.
        folder = self._run.checkpoints
        with reading(folder):
            patiently(folder.stat)
            return [path.name for path in patiently(partial(checkpoints.candidates, folder))]

    def _refuse_step_0(self, damaged: list[str]) -> None:
        """On rank 0, which has no good checkpoint: raise HpcDdpError if the run has had one, or
        `damaged` names one.

        Raise DiskError if that can't be read.
        """
        with reading(self._run.checkpoints):
            lost = damaged or checkpoints.lost(self._run)
        if lost:
            raise HpcDdpError(
                f"{self._run.path} has no good checkpoint any more, and does not begin at step 0"
                f" by itself: {'; '.join(lost)}",
                hint="to begin at step 0, and keep what there is:"
                f" {checkpoints.fresh_command(self._run)}",
            )

    def _open(self, folder: Path) -> Restored:
        """Open a checkpoint; a collective, since rank 0 reads the index for all: each rank would
        open a file of each. Raise HpcDdpError as `_read_index`."""
        index = on_first(self.control, partial(_read_index, folder))
        return Restored(folder, index, self.control.rank, self.control.world_size)

    def _damage_of(self, folder: Path) -> str | None:
        """Return what is damaged in a checkpoint, None where nothing is; the same on all ranks. A
        collective, which raises DiskError on all of them if the disk of one does not answer."""
        # Asked again after damage, since it may have been the disk's and not the file's.
        return self._find_damage(folder) and self._find_damage(folder)

    def _find_damage(self, folder: Path) -> str | None:
        """Let the ranks verify a checkpoint together; all return the same damage, or None, or raise
        the same DiskError. Every rank must call it; raise RuntimeError if a peer is gone."""
        rank, world_size = self.control.rank, self.control.world_size
        answer: str | HpcDdpError | None
        try:
            with reading(folder, rank):
                answer = patiently(partial(checkpoints.find_damage, folder, rank, world_size))
        except DiskError as error:
            answer = error
        answers = self.control.to_first(answer)
        return on_first(self.control, partial(_damage_in, answers))

    def _set_aside(self, folder: Path, why: str) -> None:
        """Rename a damaged checkpoint to `.bad-`, and print why; one that can't be renamed
        stays."""
        try:
            target = disk.set_aside(folder, "bad", self._attempt).name
        except OSError as error:  # a folder that can be read only: the next start passes it over
            target = f"{folder.name}: {error}"
        say(f"PASSED OVER the checkpoint {folder.name}: {why}; kept as {target}")

    def _report_restore(self, chosen: Path | None, passed_over: list[str], took_s: float) -> None:
        """Journal the step of the chosen checkpoint (0 without one) and those passed over, but not
        where there are neither; print the step, but not of a first attempt without a checkpoint.
        `took_s` is the time of verifying, in seconds."""
        step = checkpoints.step_of(chosen) if chosen else 0
        if chosen or passed_over:
            self._journal.write(CheckpointRestored(step, passed_over, round(took_s, 3)))
        if chosen:
            say(f"going on from step {step} of {self._run.path}")
        elif self._attempt:
            say(f"no checkpoint to go on from: attempt {self._attempt} begins at step 0")


def non_finite_error(run: RunFolder, step: int) -> HpcDdpError:
    """Return the error that ends a run whose weights have NaN or infinity in them at `step`.

    It names the newest checkpoint; raise OSError if the folder can't be listed.
    """
    newest_first = checkpoints.candidates(run.checkpoints)
    last = newest_first[0].name if newest_first else "none"
    return HpcDdpError(
        f"the weights have NaN or infinity in them; it came at or before step {step}; last"
        f" checkpoint: {last}",
        hint="lower the learning rate, or clip: run.update(optimizer, clip_norm=1.0)",
    )
