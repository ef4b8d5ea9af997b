"""Saving a run together: every rank calls these, rank 0 decides for all.

The training's thread copies the state (`Content`); another thread writes it, agrees with its peers
over a process group of its own, and publishes. The next save waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hpc_ddp.core import checkpoints
from hpc_ddp.core.checkpoints import FileFacts
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.journal.events import CheckpointSaved, SaveFailed
from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.core.run_folder import NO_ROOM, RunFolder
from hpc_ddp.training.checkpoint.rank_comparison import find_misfit
from hpc_ddp.training.checkpoint.rank_part import Content, Written, payload_of, write_payload
from hpc_ddp.training.checkpoint.restore import Restorer, non_finite_error
from hpc_ddp.training.checkpoint.storage import disk, retention
from hpc_ddp.training.checkpoint.storage.frozen import FrozenWeights
from hpc_ddp.training.checkpoint.storage.index import (
    FROZEN,
    STATE,
    Claim,
    Plan,
    dump_index,
    plan_of,
)
from hpc_ddp.training.checkpoint.storage.layout import Layout
from hpc_ddp.training.checkpoint.storage.retention import Retention
from hpc_ddp.training.process.rank_messages import Control

TRIES = 3  # failed saves in a row that end the run, if they are spread over `PATIENCE_S`
PATIENCE_S = 30.0
NON_FINITE = "non-finite"  # a rank's answer in place of what it has written

T = TypeVar("T")


class SupersededError(HpcDdpError):
    """A later attempt of this run has started: this one must not touch the run any more."""


@dataclass(frozen=True)
class Outcome:
    """The result of a save, the same on all ranks.

    Attributes
    ----------
    size
        of the checkpoint that was published, in bytes
    failure
        why it could not be saved; "" after a success, and where only `error` says why not
    error
        the one that ends the run: no other try would end otherwise
    """

    size: int = 0
    failure: str = ""
    error: HpcDdpError | None = None


class Failure(NamedTuple):
    """An error as a rank sends it to rank 0: its ``errno``, if it has one, and its text."""

    code: int | None
    text: str


class Checkpoints(Restorer):
    """The checkpoints of a run, as this attempt sees them; old ones that `keep` does not name are
    removed. `control` carries messages of the training's thread, `background` those of the saving
    thread. `journal` gets each save, or its failure. `node` is the name of this rank's node, whose
    ranks may write into one file.
    """

    node = ""
    most_mode = 0o777  # of a published folder, which has the rights of the folder around it

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
        """Start a thread that writes and publishes `content`; first wait as `tidy` does. All ranks
        call it, after `settle`."""
        self.tidy()
        self._done.clear()
        self._is_unsettled = True
        self.stall_s = content.stall_s
        self._thread = threading.Thread(target=self._save, args=(content,), daemon=True)
        self._thread.start()

    def tidy(self) -> None:
        """Wait until the thread of the last save, if any, has ended: on rank 0 it removes old
        checkpoints after its save."""
        if self._thread is not None:
            self._thread.join()

    def settle(self) -> bool:
        """Wait for the save that was begun. Return True if it is durable, or if none was begun
        since the last call; False if it failed and is worth another try.

        All ranks call it at the same step, and get the same answer.

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
        """Write `content` with the other ranks, and set the outcome and what follows from it
        (`saves`, `slowest_save_s`). Rank 0 also reports the outcome, and after a success removes
        old checkpoints. It raises nothing."""
        began = time.monotonic()
        try:
            outcome = self._write_together(content)
        except Exception as error:  # a peer is gone: the training will find that out, too
            outcome = self._count_failure(f"the ranks could not agree: {error}", PATIENCE_S)
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
        """Write and publish a checkpoint, if the ranks' tensors make a whole and there is room for
        them; return the outcome, the same on all ranks.

        A rank sends an error as a `Failure`, since its peers wait for an answer. It is a
        collective: raise RuntimeError if a peer is gone.
        """
        draft = disk.draft(self._run.checkpoints, content.step, self._attempt)
        try:
            claim, payload = self._prepare(content)
            inventory = content.inventory()
            answer: Claim | Failure = claim
        except Exception as error:  # whatever it is, the peers wait for an answer
            answer = failure_of(error)
        plan = self._decide(self._open_draft, draft, content, answer)
        if isinstance(plan, Outcome):
            return plan  # for the failure of this rank, or of any
        if misfit := find_misfit(self._background, inventory):
            if self._is_first:
                disk.remove(draft)
            return Outcome(failure=misfit.message, error=misfit)
        written = self._write(draft, plan, payload, content)
        return self._decide(partial(self._publish, plan), draft, content, written)

    def _decide(
        self,
        decide: Callable[[Path, Content, list[Any]], T],
        draft: Path,
        content: Content,
        answer: object,
    ) -> T | Outcome:
        """Send the `answer` of each rank to rank 0, and return rank 0's decision on all ranks: the
        result of ``decide(draft, content, answers)``, with the answers by rank.

        If an answer is a `Failure`, or `decide` raises an error, the decision is the failed outcome
        from `_drop`. All ranks call it; raise RuntimeError if a peer is gone.
        """
        answers = self._background.to_first(answer)
        decision: T | Outcome | None = None
        if self._is_first:
            is_failed = any(isinstance(reply, Failure) for reply in answers)
            try:
                decision = (self._drop if is_failed else decide)(draft, content, answers)
            except Exception as error:  # the peers wait for an answer
                decision = self._drop(draft, content, [failure_of(error)])
        agreed: T | Outcome = self._background.from_first(decision)
        return agreed

    def _prepare(self, content: Content) -> tuple[Claim, Any]:
        """Wait until the state is copied, and add the time of the copy to `stall_s`; return this
        rank's claim, and the payload for `_write`."""
        self.stall_s = content.stall_s + content.buffer.wait()
        return payload_of(content, self.node)

    def _open_draft(self, draft: Path, content: Content, claims: list[Claim]) -> Plan:
        """On rank 0: make the draft's folder, and return the plan of where the ranks write. With
        too little room, remove the parcel of ``--stage``, and then old checkpoints.

        Raise OSError if the folder can't be made, or there is no room even then.
        """
        plan = plan_of(claims)
        size = sum(part.size for part in plan.parts) + sum(claim.frozen for claim in claims)
        # Files: index and manifest, those of parts, and one per rank with frozen weights.
        count = 2 + len({p.file for p in plan.parts}) + sum(len(c.layouts) > 1 for c in claims)
        disk.make_draft(draft)
        for free_space in (self._remove_parcel, partial(self._make_room, content)):
            try:
                disk.check_space(draft, size, count)
                return plan
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                free_space()
        disk.check_space(draft, size, count)
        return plan

    def _write(self, draft: Path, plan: Plan, payload: Any, content: Content) -> Any:
        """Write this rank's part of a draft, as planned. Return a `Written`, `NON_FINITE` if its
        weights are not finite, or a `Failure` for an error."""
        rank = self._background.rank
        try:
            written = write_payload(payload, draft, plan, rank, content, self.frozen)
        except Exception as error:  # the peers wait for an answer
            return failure_of(error)
        return written or NON_FINITE

    def _publish(self, plan: Plan, draft: Path, content: Content, answers: list[Any]) -> Outcome:
        """On rank 0: write index and manifest of a draft from the ranks' `answers` (of `_write`, no
        `Failure` among them), and publish it. If weights are not finite, or the attempt is
        superseded, remove it; the outcome has that error. Raise OSError if the disk refuses, and
        any error of `before_publishing`."""
        if NON_FINITE in answers:
            disk.remove(draft)
            return Outcome(error=non_finite_error(self._run, content.step))
        files = self._write_index(plan, draft, content, answers)
        facts = {
            "format": checkpoints.FORMAT,
            "step": content.step,
            "world_size": self._background.world_size,
            "keep_every": self._keep.every,
            **content.facts,
        }
        self.before_publishing(content.step)
        disk.write_manifest(draft, facts, files)
        # As late as can be: a later attempt sees the checkpoint from the rename on.
        if not self._run.is_newest(self._attempt):
            disk.remove(draft)
            return Outcome(error=self._superseded_error())
        disk.publish(draft, self._attempt, self.most_mode)
        return Outcome(sum(part.size for parts in files.values() for part in parts))

    def _write_index(
        self, plan: Plan, draft: Path, content: Content, answers: Sequence[Written]
    ) -> dict[str, list[FileFacts]]:
        """On rank 0: write the index of a draft, by what the ranks have written; return the facts
        on all its files' parts, by file name. Raise OSError if the disk refuses."""
        files: dict[str, list[FileFacts]] = {}
        layouts: dict[int, Layout] = {}
        for rank, (part, written) in enumerate(zip(plan.parts, answers, strict=True)):
            files.setdefault(part.file, []).append(written.part)
            if written.frozen:
                files[FROZEN.format(rank)] = [written.frozen]
            layouts |= written.layouts
        state = disk.write_file(draft / STATE, dump_index(plan, layouts, content.shared))
        return {**files, STATE: [state]}

    def _drop(self, draft: Path, content: Content, answers: Sequence[object]) -> Outcome:
        """On rank 0: remove a draft, and count the first `Failure` among the `answers`; return its
        outcome. If the disk was full, remove the parcel too, or without one old checkpoints."""
        disk.remove(draft)
        rank, failure = next((r, a) for r, a in enumerate(answers) if isinstance(a, Failure))
        if failure.code in NO_ROOM:
            with suppress(OSError):
                if not self._remove_parcel():
                    self._make_room(content)
        return self._count_failure(f"rank {rank}: {failure.text}")

    def _count_failure(self, reason: str, lasted_s: float = 0.0) -> Outcome:
        """Count a failed save, which has lasted for `lasted_s` seconds; return its outcome, with an
        error after `TRIES` or more failures in a row, the first one `PATIENCE_S` ago or earlier."""
        now = time.monotonic()
        self._failed_at.append(now - lasted_s)
        error: HpcDdpError | None = None
        if len(self._failed_at) >= TRIES and now - self._failed_at[0] >= PATIENCE_S:
            path, folder = self._run.quoted, self._run.checkpoints
            error = HpcDdpError(
                f"{len(self._failed_at)} saves in a row failed in {folder}: {reason}",
                hint=f"look for free space, inodes and quota: df -h {path}; df -i {path}",
            )
        return Outcome(failure=reason, error=error)

    def _prune(self, content: Content, keep: Retention, *pinned: int) -> None:
        """On rank 0: remove old checkpoints, apart from the best one, those of this step and of the
        `pinned` steps, and those that `keep` names; errors of the disk are ignored."""
        best = content.facts.get("best") or {"step": content.step}
        with suppress(OSError):  # a folder that is not to be had now; the next save tries again
            retention.prune(self._run.checkpoints, keep, [content.step, best["step"], *pinned])

    def _remove_parcel(self) -> bool:
        """On rank 0: remove the parcel of ``--stage`` (`RunFolder.remove_parcel`), and return True.
        Return False where there is no parcel, or the attempt is superseded. Raise OSError if the
        attempts can't be listed."""
        return self._run.is_newest(self._attempt) and self._run.remove_parcel("a checkpoint")

    def _make_room(self, content: Content) -> None:
        """On rank 0: remove all checkpoints but the newest `retention.LEAST_KEPT`, the best ones,
        and those of ``keep_every``. In a superseded attempt remove none. Raise OSError if the
        attempts or the checkpoints can't be listed."""
        if self._run.is_newest(self._attempt):
            # The best one on the disk, too: this save may be of a better one, and fail.
            best = retention.best_steps(self._run.checkpoints)
            self._prune(content, Retention(retention.LEAST_KEPT, self._keep.every), *best)

    def _superseded_error(self) -> SupersededError:
        """Return the error of an attempt that a later one has superseded."""
        return SupersededError(
            f"attempt {self._attempt} of {self._run.path} has been superseded by a later one"
            " and leaves the run alone"
        )

    def _report(self, content: Content, took_s: float) -> None:
        """On rank 0: journal a save, which took `took_s` seconds, or journal and print its failure;
        an `error` without a failure is left to `settle`."""
        outcome = self._outcome
        if outcome.failure:
            self._journal.write(SaveFailed(content.step, outcome.failure))
            say(f"the checkpoint of step {content.step} could not be saved ({outcome.failure})")
        elif outcome.error is None:
            since = self._awaited_since  # the time for which `settle` has waited is a stall, too
            stall_s = self.stall_s + (0.0 if since is None else time.monotonic() - since)
            times = round(stall_s, 4), round(took_s, 4)
            self._journal.write(CheckpointSaved(content.step, *times, outcome.size))


def failure_of(error: Exception) -> Failure:
    """Return an error in the form in which a rank sends it to rank 0."""
    return Failure(getattr(error, "errno", None), str(error) or repr(error))
