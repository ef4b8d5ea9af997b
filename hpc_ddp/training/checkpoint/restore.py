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
from hpc_ddp.training.models.precision import NON_FINITE_WEIGHTS
from hpc_ddp.training.models.trained_parameters import TrainedParameters
from hpc_ddp.training.process.process_group import call_on_first
from hpc_ddp.training.process.rank_messages import Control


class Restored:
    """A checkpoint that is open: `index` is read, tensors are read later, by `reader`. `step` is
    the checkpoint's.

    If `world_size` ranks wrote the checkpoint, the reader has the tensors that `rank` had of its
    own (see `rank_part.parts_of_rank`). Else (`is_resized`) it has the buffers of the first rank of
    a stage, and no other tensors of ranks' own.
    """

    def __init__(self, folder: Path, index: Index, rank: int, world_size: int) -> None:
        """`index` is that of `folder`; `rank` and `world_size` are those of this start."""
        self._folder, self._rank = folder, rank
        self.step, self.index = checkpoints.step_of(folder), index
        self.is_resized = index.world_size != world_size
        self.reader = reader_of(folder, index, None if self.is_resized else rank)

    def values_of(self, rank: int) -> dict[str, Any]:
        """Return the plain values that the writer `rank` had of its own; raise DiskError if they
        can't be read."""
        with reading(self._folder, self._rank):
            return read_values(self._folder, self.index.parts[rank])


class Loaded:
    """A checkpoint that has been loaded into objects. At a resume lines of the script that had run
    before the checkpoint run again, and may change models and optimizers once more: `put_back`
    undoes that."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        tree: Mapping[str, Any],
        checkpoint: Restored,
        trained: TrainedParameters,
        added: Sequence[str],
    ) -> None:
        """Compute digests of the tensors of the models and optimizers, right after the load, and
        keep them. `objects`, `tree` and `added` are as in `put_back.put_back`; `trained` knows the
        flags that the script has made."""
        kinds = (torch.nn.Module, torch.optim.Optimizer)
        self._objects = {n: o for n, o in objects.items() if isinstance(unwrap(o), kinds)}
        self._tree, self._checkpoint = tree, checkpoint
        self._trained, self._added = trained, added
        self._sums = self._sum_up()

    def put_back(self, is_stage: bool, accepts_settings: bool) -> list[str]:
        """Load those models and optimizers anew whose tensors have changed since the load; put back
        all flags of models. With `accepts_settings` a change of optimizers' settings alone does not
        count. Return a line of text for each object whose tensors had changed, then one for each
        model whose flags had. `is_stage` is the `stage` of `put_back.put_back`, whose errors are
        raised. It is no collective."""
        # The script may look at its first batch, which calls this, in another mode.
        with torch.inference_mode(False), torch.no_grad():
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
        """Load anew the models whose tensors have changed; all models and optimizers if an
        optimizer's have changed. Return the names of the objects that had changed, and all models
        by name. The arguments and errors are those of `put_back`.

        The digests of the models, which the next call compares with, become those after this load:
        a load keeps the type that the script has given to a model, and with another type the
        digests of the first load would never come back. The reader reads for this rank alone from
        now on."""
        sums, reader = self._sum_up(), self._checkpoint.reader
        modules = {n: o for n, o in self._objects.items() if isinstance(unwrap(o), torch.nn.Module)}
        changed = {
            place.partition(".")[0]  # the object's name, of ``optimizer.state.fc.weight.exp_avg``
            for place in sums.keys() | self._sums.keys()  # one of an optimizer may be gone
            if self._sums.get(place) != sums.get(place)
            and not (accepts_settings and optimizer_state.is_setting(place))
        }
        # An optimizer's tensors have the names of the models' parameters.
        objects = self._objects if changed - modules.keys() else {n: modules[n] for n in changed}
        tree = {name: self._tree[name] for name in objects}
        reader.sharing = None  # each rank reads for itself: the others may have no changes
        put_back.put_back(objects, tree, reader, self._checkpoint.step, is_stage, self._added)
        reader.close_files()
        sums = self._sum_up() if changed else sums
        of_models = {place for place in sums if place.partition(".")[0] in modules}
        self._sums |= {place: sums[place] for place in of_models}
        return changed, modules

    def _sum_up(self) -> dict[str, int]:
        """Return digests of those of the objects' tensors on this rank that the checkpoint has, by
        the tensors' names (`State.tensors`); of a DTensor that of this rank's shard."""
        tensors = {}
        local: Any  # a DTensor, perhaps
        for place, local in collect(self._objects, trained=self._trained).tensors.items():
            if place in self._checkpoint.reader:
                tensors[place] = local.to_local() if is_sharded(local) else local
        return start_checksums(tensors, digest)()


def _first_damage(answers: list[str | HpcDdpError | None]) -> str | None:
    """Return the first damage among the ranks' `answers`, None without any; if an answer is an
    error, raise the first error instead."""
    for answer in answers:
        if isinstance(answer, HpcDdpError):
            raise answer
    return next((answer for answer in answers if isinstance(answer, str)), None)


@contextmanager
def reading(folder: Path, rank: int = 0) -> Iterator[None]:
    """Run the block, which reads `folder` on the rank `rank`; raise a DiskError, which names both,
    in place of an OSError of the block."""
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
    """Open a checkpoint that has been verified, in this process alone, and return it. As on another
    number of ranks (`Restored.is_resized`), it lacks the tensors that ranks had of their own, apart
    from buffers. Raises as `read_index`."""
    return Restored(folder, read_index(folder), rank=0, world_size=0)


def _read_index(folder: Path) -> Index:
    """On rank 0, for whose answer the others wait: return the index of a checkpoint. Raise
    DiskError if it can't be read, HpcDdpError for any other error of the reading."""
    with reading(folder):
        try:
            return read_index(folder)
        except (HpcDdpError, OSError):
            raise
        except Exception as error:  # whatever torch makes of such a file; the others wait
            raise HpcDdpError(f"{folder} can't be opened: {error!r}") from error


class Restorer:
    """Opens the checkpoints of a run, as this attempt sees them.

    Its public methods are collectives: all ranks must call them, and get the same checkpoint. The
    ranks judge a checkpoint together, and raise the same error. Then each opens it; an error of the
    opening may be one rank's alone. They raise RuntimeError if a peer is gone.
    """

    def __init__(self, run: RunFolder, attempt: int, control: Control, journal: Journal) -> None:
        self._run, self._attempt = run, attempt
        self.control, self._journal = control, journal

    def restore(self) -> Restored | None:
        """Open and return the newest checkpoint that verifies; None for a run that has never had
        one, or none since ``--fresh``. It has the side effects of `find_newest`.

        Raises
        ------
        HpcDdpError
            as `find_newest`; or it can't be opened, as one of another version of hpc-ddp
        """
        newest = self.find_newest()
        if newest is None:
            return None
        disk.intact.add(newest)  # a save of this step need not verify it again
        return self._open(newest)

    def find_newest(self) -> Path | None:
        """Verify checkpoints, the newest first, and return the folder of the first good one; None
        for a run that has never had one, or none since ``--fresh``. The ranks share the reading.

        Rank 0 renames each damaged one to `.bad-`, names it on stderr and in the journal, removes
        half-written ones, and prints and journals the step.

        Raises
        ------
        HpcDdpError
            a disk does not answer for a minute; or the run has had checkpoints, and none is good
        """
        began = time.monotonic()
        names = call_on_first(self.control, self._find_names)
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
            call_on_first(self.control, partial(self._refuse_step_0, passed_over))
        return chosen

    def load(self, step: int) -> Restored:
        """Verify and open the checkpoint of a step, and return it; a damaged one stays as it is.

        Raises
        ------
        HpcDdpError
            it is not there, or damaged, or can't be read, or is another version's
        """
        folder = self._run.checkpoints / f"step-{step}"
        names = call_on_first(self.control, self._find_names)
        damage = self._damage_of(folder) if folder.name in names else "it is not there"
        if damage:
            raise HpcDdpError(f"{folder}: {damage}", hint=f"hpc-ddp verify {self._run.quoted}")
        return self._open(folder)

    def _find_names(self) -> list[str]:
        """On rank 0: return the names of the folders that may be checkpoints, newest first. Raise
        DiskError if they can't be listed for a minute."""
        # A disk that is gone for a moment must not look like a run without checkpoints.
        folder = self._run.checkpoints
        with reading(folder):
            patiently(folder.stat)
            return [path.name for path in patiently(partial(checkpoints.candidates, folder))]

    def _refuse_step_0(self, damaged: list[str]) -> None:
        """On rank 0, where no checkpoint is good: raise HpcDdpError unless this is a run that has
        had no checkpoint, or none since ``--fresh``. `damaged` has a line for each damaged one.
        Raise DiskError if the run's files can't be read."""
        with reading(self._run.checkpoints):
            lost = damaged or checkpoints.describe_lost(self._run)
        if lost:
            raise HpcDdpError(
                f"{self._run.path} has no good checkpoint any more, and does not begin at step 0"
                f" by itself: {'; '.join(lost)}",
                hint="to begin at step 0, and keep what there is:"
                f" {checkpoints.fresh_command(self._run)}",
            )

    def _open(self, folder: Path) -> Restored:
        """Open a verified checkpoint, and return it. It is a collective: rank 0 reads the index for
        all, since each rank would otherwise open files of all. Raise HpcDdpError as `_read_index`,
        RuntimeError if a peer is gone."""
        index = call_on_first(self.control, partial(_read_index, folder))
        return Restored(folder, index, self.control.rank, self.control.world_size)

    def _damage_of(self, folder: Path) -> str | None:
        """Verify a checkpoint; return a text on its damage, None for a good one, on all ranks the
        same. It is a collective. Raises as `_find_damage`."""
        # Verified again after damage, since it may have been the disk's and not the file's.
        return self._find_damage(folder) and self._find_damage(folder)

    def _find_damage(self, folder: Path) -> str | None:
        """Verify a checkpoint, once, of which each rank reads a share; return a text on the first
        damage, or None, on all ranks the same. All ranks must call it. If the disk of one does not
        answer for a minute, all raise DiskError; raise RuntimeError if a peer is gone."""
        rank, world_size = self.control.rank, self.control.world_size
        answer: str | HpcDdpError | None
        try:
            with reading(folder, rank):
                answer = patiently(partial(checkpoints.find_damage, folder, rank, world_size))
        except DiskError as error:
            answer = error
        answers = self.control.to_first(answer)
        return call_on_first(self.control, partial(_first_damage, answers))

    def _set_aside(self, folder: Path, damage: str) -> None:
        """On rank 0: rename a damaged checkpoint to `.bad-`, and print the damage. A folder that
        can't be renamed stays as it is, and the printed line says so."""
        try:
            target = disk.set_aside(folder, "bad", self._attempt).name
        except OSError as error:  # a folder that can be read only: the next start passes it over
            target = f"{folder.name}: {error}"
        say(f"PASSED OVER the checkpoint {folder.name}: {damage}; kept as {target}")

    def _report_restore(self, chosen: Path | None, passed_over: list[str], took_s: float) -> None:
        """On rank 0: journal the step of the chosen checkpoint (0 without one) and the damaged
        ones, `passed_over`; print the step. Nothing is journalled without any checkpoint, good or
        damaged, and nothing is printed at a first attempt without a good one. `took_s` is the time
        of verifying, in seconds."""
        step = checkpoints.step_of(chosen) if chosen else 0
        if chosen or passed_over:
            self._journal.write(CheckpointRestored(step, passed_over, round(took_s, 3)))
        if chosen:
            say(f"going on from step {step} of {self._run.path}")
        elif self._attempt:
            say(f"no checkpoint to go on from: attempt {self._attempt} begins at step 0")


def non_finite_error(run: RunFolder, step: int, fault: str = NON_FINITE_WEIGHTS) -> HpcDdpError:
    """Return the error that ends a run at `step`, with a text `fault` on what is not finite, and
    the name of the newest checkpoint. Raise OSError if the checkpoints can't be listed."""
    newest_first = checkpoints.candidates(run.checkpoints)
    last = newest_first[0].name if newest_first else "none"
    return HpcDdpError(
        f"{fault}; it came at or before step {step}; last checkpoint: {last}",
        hint="lower the learning rate, or clip: run.update(optimizer, clip_norm=1.0)",
    )
