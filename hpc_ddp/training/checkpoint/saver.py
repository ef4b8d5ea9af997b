"""Saving and restoring a run together: every rank calls these, rank 0 decides for all.

A save has two halves. The training's thread copies what is to be saved (`Content`); a thread of
its own writes it, agrees with its peers over a process group of its own, and publishes. One save
is under way at a time: the next waits for it.
"""

from __future__ import annotations

import errno
import io
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpc_ddp.core import checkpoints
from hpc_ddp.core.checkpoints import FileFacts
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.journal.events import CheckpointSaved, SaveFailed
from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint import files as disk
from hpc_ddp.training.checkpoint.files import Retention
from hpc_ddp.training.checkpoint.inventory import Digest, Inventory, fit_together
from hpc_ddp.training.checkpoint.restorer import STATE, Restorer, find_misfit, print_note
from hpc_ddp.training.process.process_group import Control

TRIES = 3  # failed saves in a row that end the run, if they are spread over as many seconds:
PATIENCE_S = 30.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

_SAVED, _SUPERSEDED, _NON_FINITE = "saved", "superseded", "non-finite"
_UNFIT = "unfit"  # what the ranks have does not fit together
_FAILED, _FAILING = "failed", "failing"  # the latter for `PATIENCE_S` already


class SupersededError(HpcDdpError):
    """A later attempt of this run has started: this one must not touch the run any more."""


@dataclass(frozen=True)
class Content:
    """Everything that one rank has to save: nothing in it changes until it is saved.

    Attributes
    ----------
    step
        of the run
    facts
        for the manifest, in plain values; ``best`` (a dict with ``step``, or None) among them
    shared
        what is the same on all ranks, in plain values; rank 0's is written
    rank_values
        this rank's own plain values, ``pieces`` of its data file among them
    data
        returns the bytes of the data file, in order, and for how many seconds a device was busy
        to copy them; waits for them, behind the training
    inventory
        returns the names, shapes and parts of all tensors, for the ranks to compare; called behind
        the training
    is_finite
        returns whether all of it is finite; called behind the training
    stall_s
        for how long the host has been held up so far, in seconds
    """

    step: int
    facts: dict[str, Any]
    shared: dict[str, Any]
    rank_values: dict[str, Any]
    data: Callable[[], tuple[Sequence[memoryview], float]]
    inventory: Callable[[], Inventory]
    is_finite: Callable[[], bool]
    stall_s: float


class Failure(NamedTuple):
    """An error as a rank sends it to rank 0: its code, if it was the system's, and its text."""

    code: int | None
    text: str


class Claim(NamedTuple):
    """The amount that a rank is to write, sent to rank 0: bytes, files, a digest of its tensors."""

    size: int
    files: int
    digest: Digest


Files = dict[str, Sequence[bytes | memoryview]]
Outcome = tuple[str, str]  # of a save: its kind, and why or how many bytes


class Checkpoints(Restorer):
    """The checkpoints of a run, as this attempt sees them.

    `control` is for the training's thread, `background` for the one that saves.
    """

    def __init__(
        self,
        run: RunFolder,
        attempt: int,
        control: Control,
        background: Control,
        journal: Journal,
        keep: Retention,
        before_publishing: Callable[[int], None] = lambda step: None,  # on rank 0
    ) -> None:
        super().__init__(run, attempt, control, journal)
        self._background, self._keep = background, keep
        self._thread: threading.Thread | None = None
        self._known = threading.Event()  # what has become of the save is
        self._known.set()
        self._outcome: Outcome = (_SAVED, "")
        self._refusal: HpcDdpError | None = None  # no other try would end otherwise
        self._failures = 0
        self._failing_since: float | None = None  # on rank 0, whose clock counts
        self._begun = False
        self._awaited_since: float | None = None
        self.stall_s = 0.0  # for how long the last save held the training up, in seconds
        self.slowest_save_s = 0.0  # the longest time until one was durable, in seconds
        self._before_publishing = before_publishing

    # -- saving ----------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        return not self._known.is_set()

    @property
    def failed(self) -> bool:
        """The last save has failed, or found the run taken over; `settle` says so to all ranks."""
        return not self.in_flight and self._outcome[0] != _SAVED

    def begin(self, content: Content) -> None:
        """Start to write; the one before has been settled."""
        self.tidy()
        self._known.clear()
        self._begun = True
        self.stall_s = content.stall_s
        self._thread = threading.Thread(target=self._save, args=(content,), daemon=True)
        self._thread.start()

    def tidy(self) -> None:
        """Wait until old checkpoints are removed, too."""
        if self._thread is not None:
            self._thread.join()

    def settle(self) -> bool:
        """Wait until what was begun is durable; False when it failed and is worth another try.

        All ranks call it at the same step, and get the same answer.

        Raises
        ------
        HpcDdpError
            it failed for the third time in a row, and has done so for half a minute
        SupersededError
            a later attempt has started; nothing was published
        HpcDdpError
            not all of the weights were finite, or what the ranks have does not make a whole;
            nothing was published
        """
        if not self._begun:
            return True
        self._awaited_since = time.monotonic()
        self._known.wait()
        self._awaited_since, self._begun = None, False
        kind, why = self._outcome
        if kind == _SUPERSEDED:
            raise SupersededError(
                f"attempt {self._attempt} of {self._run.path} has been superseded by a later one"
                " and leaves the run alone"
            )
        if kind == _NON_FINITE:
            raise self.non_finite_error(why)
        if self._refusal is not None:
            raise self._refusal
        self._failures = self._failures + 1 if kind in (_FAILED, _FAILING) else 0
        if kind == _FAILING and self._failures >= TRIES:
            raise HpcDdpError(
                f"{self._failures} saves in a row failed in {self._run.checkpoints}: {why}",
                hint=f"look at the folder, and for free space and quota: df -h {self._run.path}",
            )
        return kind == _SAVED

    def _save(self, content: Content) -> None:
        """In the thread: take part in a save, and report it."""
        began = time.monotonic()
        first = self._background.rank == 0
        draft = disk.draft(self._run.checkpoints, content.step, self._attempt)
        try:
            self._outcome = self._write_together(draft, content)
        except Exception as error:  # a peer is gone: the training will find that out, too
            self._outcome = _FAILING, f"the ranks could not agree: {error}"
        took = time.monotonic() - began
        self.slowest_save_s = max(self.slowest_save_s, content.stall_s + took)
        if first:
            self._report(content, took)
        self._known.set()
        # Only now, with the new one durable; no rank waits for it, and the next start repairs a
        # kill in between.
        if first and self._outcome[0] == _SAVED:
            self._prune(content, self._keep)

    def _prune(self, content: Content, keep: Retention) -> None:
        """On rank 0: remove old checkpoints, but for the best and what `keep` names."""
        best = content.facts.get("best") or {"step": content.step}
        with suppress(OSError):  # a folder that is not to be had now; the next save tries again
            disk.prune(self._run.checkpoints, keep, [content.step, best["step"]])

    def _write_together(self, draft: Path, content: Content) -> Outcome:
        """Write, where all ranks have what belongs together and there is room for all of it.

        Every rank answers each time, be it by a `Failure`, since its peers wait for it.
        """
        background, is_first = self._background, self._background.rank == 0
        files, claim = self._prepare(content)
        claims = background.to_first(claim)
        outcome = background.from_first(
            self._refuse_early(draft, content, claims) if is_first else None
        )
        if outcome is None:
            answers = background.to_first(self._write(draft, files, content))
            outcome = background.from_first(
                self._be_patient(self._judge(draft, content, answers)) if is_first else None
            )
        elif outcome[0] == _UNFIT:
            self._refusal = find_misfit(background, content.inventory())
            outcome = _UNFIT, self._refusal.message
        result: Outcome = outcome
        return result

    def _prepare(self, content: Content) -> tuple[Files, Claim | Failure]:
        """Return what this rank's files are to hold, by name, and how much that is."""
        rank = self._background.rank
        try:
            files: Files = {f"rank-{rank}.pt": [_dump(content.rank_values)]}
            data, copy_s = content.data()
            self.stall_s = content.stall_s + copy_s
            if content.rank_values["pieces"]:  # of tensors without numbers it is empty
                files[f"tensors-{rank}.bin"] = data
            if rank == 0:
                files[STATE] = [_dump(content.shared)]
            size = sum(len(part) for parts in files.values() for part in parts)
            return files, Claim(size, len(files), content.inventory().digest)
        except Exception as error:  # whatever it is, the peers wait for an answer
            return {}, _failure(error)

    def _refuse_early(
        self, draft: Path, content: Content, claims: list[Claim | Failure]
    ) -> Outcome | None:
        """On rank 0, before anything is written: return why nothing is to be, None to go on."""
        sound = [claim for claim in claims if isinstance(claim, Claim)]
        if len(sound) < len(claims):
            return self._be_patient(self._drop(draft, content, claims))
        if not fit_together([claim.digest for claim in sound]):
            return _UNFIT, ""
        size, files = sum(claim.size for claim in sound), sum(claim.files for claim in sound)
        try:
            draft.mkdir(parents=True, exist_ok=True)
            try:
                disk.check_space(draft, size, files + 1)
            except OSError:
                self._make_room(content)
                disk.check_space(draft, size, files + 1)
        except OSError as error:
            return self._be_patient(self._drop(draft, content, [_failure(error)]))
        return None

    def _write(
        self, draft: Path, files: Files, content: Content
    ) -> dict[str, FileFacts] | str | Failure:
        """Write this rank's files of a draft; return what goes into the manifest."""
        try:
            with ThreadPoolExecutor(1) as pool:  # while the disk is busy
                sound = pool.submit(content.is_finite)
                facts = {n: disk.write_file(draft / n, *parts) for n, parts in files.items()}
            return facts if sound.result() else _NON_FINITE
        except Exception as error:  # as above
            return _failure(error)

    def _drop(self, draft: Path, content: Content, answers: Sequence[object]) -> Outcome:
        """On rank 0: remove a draft of which a rank has failed; see to room if that was why."""
        disk.remove(draft)
        rank, failure = next((r, a) for r, a in enumerate(answers) if isinstance(a, Failure))
        if failure.code in NO_ROOM:
            self._make_room(content)
        return _FAILED, f"rank {rank}: {failure.text}"

    def _make_room(self, content: Content) -> None:
        """On rank 0: let all but the newest checkpoints, the best and the milestones give way."""
        if self._run.is_newest(self._attempt):
            self._prune(content, Retention(disk.LEAST, self._keep.every))

    def _judge(self, draft: Path, content: Content, answers: list[Any]) -> Outcome:
        """On rank 0: complete and publish a draft, or remove it."""
        if _NON_FINITE in answers:
            disk.remove(draft)
            return _NON_FINITE, str(content.step)
        if any(isinstance(answer, Failure) for answer in answers):
            return self._drop(draft, content, answers)
        files: dict[str, FileFacts] = {
            n: facts for answer in answers for n, facts in answer.items()
        }
        facts = {
            "format": checkpoints.FORMAT,
            "step": content.step,
            "world_size": self._background.world_size,
            **content.facts,
        }
        try:
            self._before_publishing(content.step)
            disk.write_manifest(draft, facts, files)
            # Looked at as late as can be: from the rename on, a successor would see it.
            if not self._run.is_newest(self._attempt):
                disk.remove(draft)
                return _SUPERSEDED, ""
            disk.publish(draft, self._attempt)
        except Exception as error:  # as above
            return self._drop(draft, content, [_failure(error)])
        return _SAVED, str(sum(file_facts.size for file_facts in files.values()))

    def _be_patient(self, outcome: Outcome) -> Outcome:
        """On rank 0: tell apart failures that have lasted and those that may pass."""
        kind, why = outcome
        if kind != _FAILED:
            self._failing_since = None
            return outcome
        self._failing_since = self._failing_since or time.monotonic()
        lasted = time.monotonic() - self._failing_since >= PATIENCE_S
        return (_FAILING if lasted else _FAILED), why

    def _report(self, content: Content, took: float) -> None:
        kind, detail = self._outcome
        if kind in (_FAILED, _FAILING, _UNFIT):
            self._journal.write(SaveFailed(content.step, detail))
            print_note(f"the checkpoint of step {content.step} could not be saved ({detail})")
        elif kind == _SAVED:
            since = self._awaited_since  # the training waits for it: that is a stall, too
            waited = 0.0 if since is None else time.monotonic() - since
            stall = self.stall_s + waited
            self._journal.write(
                CheckpointSaved(content.step, round(stall, 4), round(took, 4), int(detail))
            )

    # -- restoring -------------------------------------------------------------------------


def _failure(error: Exception) -> Failure:
    return Failure(getattr(error, "errno", None), str(error) or repr(error))


def _dump(value: Mapping[str, Any]) -> bytes:
    """Return plain values and small tensors as the bytes of a file for ``torch.load``."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
