"""Checkpoints whose files a library writes: published and verified as the run's own are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpc_ddp.core import checkpoints
from hpc_ddp.core.checkpoints import FileFacts
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import close_to_others, patiently
from hpc_ddp.core.file_owners import checkpoint_fault
from hpc_ddp.training.checkpoint.rank_comparison import Inventory
from hpc_ddp.training.checkpoint.rank_part import Content
from hpc_ddp.training.checkpoint.restore import reading
from hpc_ddp.training.checkpoint.save import (
    Checkpoints,
    Failure,
    failure_of,
)
from hpc_ddp.training.checkpoint.storage import disk
from hpc_ddp.training.checkpoint.storage.index import Claim, Plan
from hpc_ddp.training.checkpoint.storage.shards import StagingBuffer
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.process.process_group import call_on_first


class LibraryCheckpoints(Checkpoints):
    """The checkpoints of a library, as this attempt of a run sees them.

    The library fills a draft (`open_draft`). `commit` starts a thread in which each rank computes
    the CRC32 of a share of the files, and rank 0 publishes the draft. On one rank of each node
    `syncs` is true: this rank makes the files durable that are in its node's memory. `library` is
    the format's name. `own_names` are the names of files that hpc-ddp adds: a draft with these
    alone is no checkpoint.

    Such files are pickles, which can run code. So other users can't enter a draft, nor write a
    published checkpoint; one that they may have written is not loaded.
    """

    library = ""
    most_mode = 0o755
    own_names: frozenset[str] = frozenset()
    syncs = True

    def find_newest_of_library(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest checkpoint that verifies, and its manifest, with the side effects of
        `find_newest`; None if there is none. All ranks call it. Raise UsageError for a checkpoint
        that another library or hpc-ddp itself has written, HpcDdpError as `find_newest` or if the
        manifest can't be read, RuntimeError if a peer is gone."""
        folder = self.find_newest()
        if folder is None:
            return None
        manifest = call_on_first(self.control, partial(checkpoints.read_manifest, folder))
        if manifest.get("format") != self.library:
            raise UsageError(
                f"{folder} has format {manifest.get('format')!r}; accepted: {self.library!r}",
                hint="start another run: this one's checkpoints are another kind of script's",
            )
        return folder, manifest

    def open_draft(self, step: int) -> Path:
        """Wait for the previous save, then make the folder for the files of a step's checkpoint,
        unless there is one, and return it. A failed save that `settle` does not raise is ignored.
        All ranks call it. Raises as `settle`; HpcDdpError if the folder can't be made, RuntimeError
        if a peer is gone."""
        self.settle()
        draft = disk.draft(self._run.checkpoints, step, self._attempt)
        call_on_first(self.control, partial(disk.make_draft, draft, is_private=True))
        return draft

    def commit(self, step: int, facts: Mapping[str, Any], began: float) -> None:
        """Start a thread that publishes the draft that `open_draft` made for a step; `facts`, plain
        values by name, go into the manifest. `began` is when the library's save began, in seconds
        of ``time.monotonic``. All ranks call it, with the draft's files written by this rank."""
        self.begin(
            Content(
                step=step,
                facts={"format": self.library, **facts},
                shared={},
                rank_values={},
                buffer=StagingBuffer(CPU),
                trained=set(),
                inventory=partial(Inventory, stage=0, shapes={}),
                stall_s=time.monotonic() - began,
            )
        )

    def _damage_of(self, folder: Path) -> str | None:
        """Return a text on the damage in a checkpoint, or on a part of it that belongs to another
        user; None for a good one. It is a collective. Raise HpcDdpError if other users can write
        the checkpoint, DiskError if a disk does not answer, RuntimeError if a peer is gone."""
        if fault := call_on_first(self.control, partial(self._owner_fault, folder)):
            return f"{fault}, and can run code (to use it, make a copy, {folder.name}: cp -r)"
        return super()._damage_of(folder)

    def _owner_fault(self, folder: Path) -> str:
        """On rank 0: return a text on the part of a checkpoint that belongs to another user, "" if
        none does. Raise HpcDdpError as `checkpoint_fault`, DiskError if the disk does not answer
        for a minute."""
        with reading(folder):
            return patiently(partial(checkpoint_fault, self._run, folder))

    def _write_index(
        self, plan: Plan, draft: Path, content: Content, answers: Sequence[Any]
    ) -> dict[str, list[FileFacts]]:
        """Write no index: the library has its own. Return the facts on all files of a draft, by
        name, from `answers`, which has a dictionary of each rank's share of the files."""
        return {name: [facts] for answer in answers for name, facts in answer.items()}

    def _prepare(self, content: Content) -> tuple[Claim, Any]:
        """Wait until all ranks have written their files. Return an empty claim, and the paths,
        relative to the draft, of the files that this rank sees in it: at least those of its own
        node, where a network file system may hide others. Raise RuntimeError if a peer is gone."""
        self._background.barrier()  # a peer may still write
        draft = disk.draft(self._run.checkpoints, content.step, self._attempt)
        paths = (path for path in draft.rglob("*") if not path.is_dir())
        return Claim(), [str(path.relative_to(draft)) for path in paths]

    def _write(
        self, draft: Path, plan: Plan, payload: Any, content: Content
    ) -> dict[str, FileFacts] | Failure:
        """Return the size and CRC32 of this rank's share of the draft's files, by path. If this
        rank `syncs`, first make all files durable, and take from other users the right to write
        them. `payload` has the paths that this rank sees, which the ranks exchange. Return a
        `Failure` for an error, and where there are no files but `own_names`. It is a collective:
        raise RuntimeError if a peer is gone."""
        names_by_rank: list[list[str]] = self._background.to_first(payload)
        # The union on rank 0; empty on the others, which receive rank 0's.
        names: Sequence[str] = self._background.from_first(sorted(set().union(*names_by_rank)))
        rank, world_size = self._background.rank, self._background.world_size
        try:
            if not {*names} - self.own_names:
                raise FileNotFoundError(f"nothing was saved in {draft}")
            if self.syncs:
                close_to_others(draft)
                paths = [draft / name for name in names]
                for path in {*paths, *(path.parent for path in paths)}:
                    disk.sync(path)
            return {name: checkpoints.facts_of(draft / name) for name in names[rank::world_size]}
        except Exception as error:  # the peers wait for an answer
            return failure_of(error)
