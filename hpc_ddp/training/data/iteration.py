"""One iteration over a loader: the training, or a peek at some batches."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_ddp.training.data.loader import Batch, Loader


class BatchGroups:
    """Counts the batches that a script takes for each step. If their number is not `accumulate`,
    the argument of ``run.loader``, a resume forms other groups of batches than this run."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self.since_step = 0  # batches since the last step
        self.clear()

    def clear(self) -> None:
        """Forget the earlier steps, not the batches since: an epoch begins."""
        self._last = 0, 0, 0, 0  # batches of each of the last four steps; 0: before the epoch

    def end_step(self) -> str:
        """Count a step, which took the batches since the step before it. Return the text of a
        warning where a resume would group the batches otherwise, else ''."""
        count, batches, self.since_step = self._accumulate, self.since_step, 0
        self._last = (*self._last[1:], batches)
        # The epoch's first three steps, of which the first took a batch more: by a prefetcher.
        if self._last == (0, count + 1, count, count):
            return (
                "an epoch's first step has come after a batch more than the others: if a batch is"
                " fetched before the step of the one before, a resume leaves it out; run.loader"
                " fetches ahead by itself, and copies to the device meanwhile: iterate it directly"
            )
        if self._last[-2] == batches > count:  # two equal steps in a row are no accident
            return (
                f"run.step comes after {batches} batches each: a resume within an epoch groups them"
                f" otherwise; run.loader(…, accumulate={batches}) does not"
            )
        return ""


class Iteration:
    """An iteration over a loader's batches. It may change the loader's `on_first_batch`, and the
    count in its `groups`.

    `by_loop`: a ``for`` or ``yield from`` asks for the batches, and not ``next``. `is_peek`: the
    iteration was begun before the run's loop (then also `is_early`), or while another one was open.
    `is_done`: all batches of the epoch were done before it was begun.
    """

    def __init__(
        self, loader: Loader, by_loop: bool, *, is_peek: bool, is_early: bool, is_done: bool
    ) -> None:
        self._loader, self.by_loop = loader, by_loop
        self.is_peek, self.is_early, self.is_done = is_peek, is_early, is_done
        self._on_first_batch = None if is_peek else loader.on_first_batch
        self._undo: Callable[[], None] | None = None
        self._batch: Batch | None = None  # the last one
        self._batches = 0  # yielded since the last step
        # Whether the next iteration is to call `on_first_batch` if no batch of this one has a step:
        # this one is by `next`, or comes before the one in which the run's last step was.
        self._may_undo = loader.is_earlier_pass or not by_loop
        self._had_step = False  # a batch before the last one

    def begin(self) -> None:
        """Called before the first batch is made. Unless this is a peek, call the loader's
        `on_first_batch`, if it is set; take it off the loader, and keep the function that undoes
        the call."""
        if self._on_first_batch:
            self._loader.on_first_batch = None
            self._undo = self._on_first_batch()

    def add_batch(self, batch: Batch) -> None:
        """Note `batch` as the last one; unless this is a peek, count it among the batches since a
        step. Called once the batch before has had its step, or gets none."""
        self._had_step = self.has_step
        if self._batch and self._batch.is_trained:
            self._batches = 0
        self._batch = batch
        self._batches += not self.is_peek
        self._loader.groups.since_step += not self.is_peek

    @property
    def has_step(self) -> bool:
        """Whether a batch of this iteration has had its step."""
        return self._had_step or bool(self._batch and self._batch.is_trained)

    def end(self) -> None:
        """Take the batches without a step off the loader's count. If no batch of this iteration had
        a step, and `_may_undo`, also undo `on_first_batch`, so that the next iteration calls it
        again."""
        if not (self._batch and self._batch.is_trained):
            self._loader.groups.since_step -= self._batches
        self._batches = 0
        if self._undo and self._may_undo and not self.has_step:
            self._undo()
            self._loader.on_first_batch, self._undo = self._on_first_batch, None


def is_at_for(frame: FrameType) -> bool:
    """Return whether a frame that asks an iterator for its next element is at a ``for``, or a
    ``yield from``, and not at a call of ``next``."""
    return instruction_of(frame) in ("FOR_ITER", "SEND", "YIELD_FROM")


def instruction_of(frame: FrameType) -> str:
    """Return the name of the bytecode instruction that a frame is at, as FOR_ITER."""
    return instruction_at(frame.f_code, frame.f_lasti)


def instruction_at(code: CodeType, offset: int) -> str:
    """Return the name of the instruction at a byte `offset` of a code, or in whose inline cache the
    offset is."""
    instructions = code.co_code  # once, since each access makes a copy
    while dis.opname[instructions[offset]] == "CACHE":  # part of the instruction before
        offset -= 2  # bytes of an instruction
    return dis.opname[instructions[offset]]


def is_generator(code: CodeType) -> bool:
    """Return whether a code is a generator function's."""
    return bool(code.co_flags & inspect.CO_GENERATOR)
