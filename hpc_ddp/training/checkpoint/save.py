"""Saving a run together: every rank calls these, rank 0 decides for all.

The training's thread copies the state (`Content`); another thread writes it, agrees with its peers
over a process group of its own, and publishes. The next save waits for it.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpc_ddp.core import checkpoints
from hpc_ddp.core.checkpoints import FileFacts
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.journal.events import CheckpointSaved, SaveFailed
from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint import disk, schedule
from hpc_ddp.training.checkpoint.frozen import FrozenPart, FrozenWeights
from hpc_ddp.training.checkpoint.rank_comparison import Inventory, find_misfit
from hpc_ddp.training.checkpoint.restore import RECORD, STATE, Restorer, dump, non_finite_error
from hpc_ddp.training.checkpoint.schedule import Retention
from hpc_ddp.training.checkpoint.shards import StagingBuffer
from hpc_ddp.training.process.control import Control

TRIES = 3  # failed saves in a row that end the run, if they are spread over as many seconds:
PATIENCE_S = 30.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NON_FINITE = "non-finite"  # a rank's answer in place of its files

Files = dict[str, Sequence[bytes | memoryview]]


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
        plain values that are the same on all ranks; rank 0's are written
    rank_values
        this rank's own plain values, ``pieces`` of its data file among them
    buffer
        the data file's bytes; a device may still be copying them
    trained
        names of the tensors that have to be finite
    inventory
        returns the names, shapes and parts of all tensors, for the ranks to compare; called behind
        the training
    frozen
        the weights that have a data file of their own, None without any
    stall_s
        for how long the host has been held up so far, in seconds
    """

    step: int
    facts: dict[str, Any]
    shared: dict[str, Any]
    rank_values: dict[str, Any]
    buffer: StagingBuffer
    trained: set[str]
    inventory: Callable[[], Inventory]
    frozen: FrozenPart | None = None
    stall_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The result of a save, the same on all ranks.

    Attributes
    ----------
    size
        of the checkpoint that was published, in bytes
    failure
        why it could not be saved, else ""
    error
        ends the run: no other try would end otherwise
    """

    size: int = 0
    failure: str = ""
    error: HpcDdpError | None = None


class Failure(NamedTuple):
    """An error as a rank sends it to rank 0: its code, if it was the system's, and its text."""

    code: int | None
    text: str


class Claim(NamedTuple):
    """The amount that a rank is to write, sent to rank 0: bytes and files."""

    size: int
    files: int


class Checkpoints(Restorer):
    """The checkpoints of a run, as this attempt sees them; those that `keep` names stay.

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
    ) -> None:
        super().__init__(run, attempt, control, journal)
        self._background, self._keep = background, keep
        self._is_first = background.rank == 0
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # the save under way has an outcome
        self._done.set()
        self._outcome = Outcome()
        self._failed_at: list[float] = []  # the times of the last saves, if all have failed
        self._is_unsettled = False  # True from `begin` until `settle` has its outcome
        self._awaited_since: float | None = None  # when `settle` began to wait, if it does
        self.frozen = FrozenWeights()
        self.saves = 0  # that have succeeded in this attempt
        self.stall_s = 0.0  # for how long the last save held the training up, in seconds
        self.slowest_save_s = 0.0  # the longest time until one was durable, in seconds
        # Called with the step, on rank 0, when all files but the manifest are written.
        self.before_publishing: Callable[[int], None] = lambda step: None

    # -- the training's thread -------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun that has no outcome yet."""
        return not self._done.is_set()

    @property
    def failed(self) -> bool:
        """Whether the last save has failed; False while one is under way, and before the first."""
        return not self.in_flight and bool(self._outcome.failure or self._outcome.error)

    def begin(self, content: Content) -> None:
        """Wait as `tidy` does, then write in a thread; every rank calls it, after `settle`."""
        self.tidy()
        self._done.clear()
        self._is_unsettled = True
        self.stall_s = content.stall_s
        self._thread = threading.Thread(target=self._save, args=(content,), daemon=True)
        self._thread.start()

    def tidy(self) -> None:
        """Wait until the last save has ended, if any, and old checkpoints are removed."""
        if self._thread is not None:
            self._thread.join()

    def settle(self) -> bool:
        """Wait until what was begun is durable; False if it failed and is worth another try.

        All ranks call it at the same step, and get the same answer. It is given once: True where
        nothing was begun since the last call.

        Raises
        ------
        HpcDdpError
            it failed for at least the third time in a row, and has done so for half a minute; or
            not all of the weights were finite; or the ranks' tensors do not make a whole
        SupersededError
            a later attempt has started; nothing was published
        """
        if not self._is_unsettled:
            return True
        self._awaited_since = time.monotonic()
        self._done.wait()
        self._awaited_since, self._is_unsettled = None, False
        if self._outcome.error is not None:
            raise self._outcome.error
        return not self._outcome.failure

    # -- the thread that saves -------------------------------------------------------------

    def _save(self, content: Content) -> None:
        """Take part in a save, set its outcome, report it, and prune; it raises nothing."""
        began = time.monotonic()
        try:
            outcome = self._write_together(content)
        except Exception as error:  # a peer is gone: the training will find that out, too
            outcome = self._fail(f"the ranks could not agree: {error}", PATIENCE_S)
        took_s = time.monotonic() - began
        self._outcome = outcome
        is_saved = not (outcome.failure or outcome.error)
        if is_saved:
            self.slowest_save_s = max(self.slowest_save_s, content.stall_s + took_s)
            self._failed_at.clear()
            self.saves += 1
        else:
            self.frozen.forget()
        if self._is_first:
            self._report(content, took_s)
        self._done.set()
        # Only now, with the new one durable; no rank waits for it, and the next start repairs a
        # kill in between.
        if self._is_first and is_saved:
            self._prune(content, self._keep)

    def _write_together(self, content: Content) -> Outcome:
        """Write, where all ranks have what belongs together and there is room for all of it; return
        the outcome, the same on all ranks.

        Every rank answers each time, be it by a `Failure`, since its peers wait for it. Raise
        RuntimeError if a peer is gone.
        """
        draft = disk.draft(self._run.checkpoints, content.step, self._attempt)
        try:
            files, inventory = self._prepare(content), content.inventory()
            sizes = [len(part) for parts in files.values() for part in parts]
            claim: Claim | Failure = Claim(sum(sizes), len(files))
        except Exception as error:  # whatever it is, the peers wait for an answer
            claim = failure_of(error)
        if refusal := self._decide(self._open_draft, draft, content, claim):
            return refusal  # for the failure of this rank, or of any
        if misfit := find_misfit(self._background, inventory):
            if self._is_first:
                disk.remove(draft)
            return Outcome(failure=misfit.message, error=misfit)
        outcome = self._decide(self._publish, draft, content, self._write(draft, files, content))
        assert outcome is not None
        return outcome

    def _decide(
        self,
        decide: Callable[[Path, Content, list[Any]], Outcome | None],
        draft: Path,
        content: Content,
        answer: object,
    ) -> Outcome | None:
        """Return on all ranks the decision of rank 0, which has the `answer` of each of them.

        It is what `decide` returns; None: go on. Where a rank's answer is a `Failure`, or `decide`
        raises an error, it is the failure that `_drop` returns. Every rank must call it; raise
        RuntimeError if a peer is gone.
        """
        answers = self._background.to_first(answer)
        outcome: Outcome | None = None
        if self._is_first:
            is_failed = any(isinstance(reply, Failure) for reply in answers)
            try:
                outcome = (self._drop if is_failed else decide)(draft, content, answers)
            except Exception as error:  # the peers wait for an answer
                outcome = self._drop(draft, content, [failure_of(error)])
        outcome = self._background.from_first(outcome)
        return outcome

    def _prepare(self, content: Content) -> Files:
        """Wait for the copied state, set `stall_s`; return this rank's files by name."""
        rank = self._background.rank
        files: Files = {RECORD.format(rank): [dump(content.rank_values)]}
        self.stall_s = content.stall_s + content.buffer.wait()
        if content.rank_values["pieces"]:  # of tensors without numbers it is empty
            files[f"tensors-{rank}.bin"] = content.buffer.bytes
        if content.frozen and content.frozen.buffer:
            content.frozen.buffer.wait()
            files[f"frozen-{rank}.bin"] = content.frozen.buffer.bytes
        if rank == 0:
            files[STATE] = [dump(content.shared)]
        return files

    def _open_draft(self, draft: Path, content: Content, claims: list[Claim]) -> None:
        """On rank 0: make the draft's folder; with too little room, let old checkpoints give way.

        Raise OSError if it can't be made, or there is no room for all files even then.
        """
        size, files = sum(claim.size for claim in claims), sum(claim.files for claim in claims)
        draft.parent.mkdir(exist_ok=True)  # a run that was moved away is not made anew
        draft.mkdir(exist_ok=True)
        try:
            disk.check_space(draft, size, files + 1)
        except OSError:
            self._make_room(content)
            disk.check_space(draft, size, files + 1)

    def _write(
        self, draft: Path, files: Files, content: Content
    ) -> dict[str, FileFacts] | str | Failure:
        """Write this rank's files of a draft; return their facts for the manifest, `NON_FINITE`, or
        a `Failure`."""
        try:
            with ThreadPoolExecutor(1) as pool:  # while the disk is busy
                is_finite = pool.submit(content.buffer.is_finite, content.trained)
                facts = {n: disk.write_file(draft / n, *parts) for n, parts in files.items()}
                if content.frozen:
                    path = draft / f"frozen-{self._background.rank}.bin"
                    facts[path.name] = self.frozen.add(content.frozen, path, facts.get(path.name))
            return facts if is_finite.result() else NON_FINITE
        except Exception as error:  # the peers wait for an answer
            return failure_of(error)

    def _publish(self, draft: Path, content: Content, answers: list[Any]) -> Outcome:
        """On rank 0: publish a draft, of whose ranks `answers` has the files; or remove it where
        weights are not finite or the attempt is superseded, with that error in the outcome. Raise
        OSError if the disk refuses, and what `before_publishing` raises."""
        if NON_FINITE in answers:
            disk.remove(draft)
            return Outcome(error=non_finite_error(self._run, content.step))
        files: dict[str, FileFacts] = {n: fact for answer in answers for n, fact in answer.items()}
        facts = {
            "format": checkpoints.FORMAT,
            "step": content.step,
            "world_size": self._background.world_size,
            "keep_every": self._keep.every,
            **content.facts,
        }
        self.before_publishing(content.step)
        disk.write_manifest(draft, facts, files)
        # Looked at as late as can be: from the rename on, a successor would see it.
        if not self._run.is_newest(self._attempt):
            disk.remove(draft)
            return Outcome(error=self._superseded_error())
        disk.publish(draft, self._attempt)
        return Outcome(sum(file_facts.size for file_facts in files.values()))

    def _drop(self, draft: Path, content: Content, answers: Sequence[object]) -> Outcome:
        """On rank 0: remove a draft that a rank failed to write, and make room if that was why, and
        the attempts can be listed; return the failure, which counts (`_fail`)."""
        disk.remove(draft)
        rank, failure = next((r, a) for r, a in enumerate(answers) if isinstance(a, Failure))
        if failure.code in NO_ROOM:
            with suppress(OSError):
                self._make_room(content)
        return self._fail(f"rank {rank}: {failure.text}")

    def _fail(self, why: str, lasted_s: float = 0.0) -> Outcome:
        """Count a failure that has lasted for `lasted_s`; return it, with an error if too many."""
        now = time.monotonic()
        self._failed_at.append(now - lasted_s)
        error: HpcDdpError | None = None
        if len(self._failed_at) >= TRIES and now - self._failed_at[0] >= PATIENCE_S:
            path = self._run.quoted
            error = HpcDdpError(
                f"{len(self._failed_at)} saves in a row failed in {self._run.checkpoints}: {why}",
                hint=f"look for free space, inodes and quota: df -h {path}; df -i {path}",
            )
        return Outcome(failure=why, error=error)

    def _prune(self, content: Content, keep: Retention) -> None:
        """On rank 0: remove old checkpoints, but for the best and those that `keep` names.

        A disk that refuses is passed over.
        """
        best = content.facts.get("best") or {"step": content.step}
        with suppress(OSError):  # a folder that is not to be had now; the next save tries again
            schedule.prune(self._run.checkpoints, keep, [content.step, best["step"]])

    def _make_room(self, content: Content) -> None:
        """On rank 0: remove all but the newest checkpoints, the best and those of `keep.every`;
        nothing in a superseded attempt. Raise OSError if the attempts can't be listed."""
        if self._run.is_newest(self._attempt):
            self._prune(content, Retention(schedule.LEAST, self._keep.every))

    def _superseded_error(self) -> SupersededError:
        """Return the error of an attempt that a later one has superseded."""
        return SupersededError(
            f"attempt {self._attempt} of {self._run.path} has been superseded by a later one"
            " and leaves the run alone"
        )

    def _report(self, content: Content, took_s: float) -> None:
        """On rank 0: journal a save, or journal and print its failure; not an `error` alone."""
        outcome = self._outcome
        if outcome.failure:
            self._journal.write(SaveFailed(content.step, outcome.failure))
            say(f"the checkpoint of step {content.step} could not be saved ({outcome.failure})")
        elif outcome.error is None:
            since = self._awaited_since  # the training waits for it: that is a stall, too
            stall_s = self.stall_s + (0.0 if since is None else time.monotonic() - since)
            times = round(stall_s, 4), round(took_s, 4)
            self._journal.write(CheckpointSaved(content.step, *times, outcome.size))


def failure_of(error: Exception) -> Failure:
    """Return an error in the form in which a rank sends it."""
    return Failure(getattr(error, "errno", None), str(error) or repr(error))
