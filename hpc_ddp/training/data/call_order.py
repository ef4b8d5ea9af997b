"""Refuses calls of a run in an order that can't be right."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.data.iteration import instruction_of, is_generator
from hpc_ddp.training.data.loop_site import LoopSite
from hpc_ddp.training.process.failure import OuterError

if TYPE_CHECKING:
    from hpc_ddp.training.data.batch_plan import LoopKey, Position
    from hpc_ddp.training.data.loader import Loader

Kind = Literal["epochs", "steps"]


class CallOrder:
    """The place of the script: before its loop, in ``run.epochs`` or ``run.steps``, or behind it.

    A ``check_`` method returns nothing, and raises UsageError for a call that is refused.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Begin before any loop; `say` prints a line for the user."""
        self._say = say
        self._site: LoopSite | None = None  # where the last loop stands
        self.loop: Kind | None = None  # the kind of the loop that the script is in
        self.total = 0  # epochs or steps of the present loop, else of the last one
        self.judged_at: int | None = None  # the step whose weights are to be saved as the best
        self._kind: Kind | None = None  # of the present loop, else of the last one
        self.is_checkpoints = False  # whether the checkpoint was saved in this loop or at its end
        # Number of the present or last loop, from 1. Loops of one kind and total in a row, as after
        # an error, have one number.
        self.number = 0
        self._broken: dict[int, LoopKey] = {}  # loops left before their end, by number
        self._is_left_by_break = False  # the last of them, and not by an exception
        self._thread: int | None = None  # the thread that has asked for the last batch
        self._abandoned: dict[int, LoopKey] = {}  # as the checkpoint's position has them
        self._is_abandoned = False  # whether an earlier attempt has left the present loop for good
        self._outer_error = OuterError()  # of `start`, or of the last loop

    @contextmanager
    def enter_loop(
        self, loop: Kind, total: int, is_tracked: bool, position: Position
    ) -> Iterator[tuple[bool, LoopSite]]:
        """A context for the body of ``run.epochs`` or ``run.steps``, a loop of `total` epochs or
        steps. Gives whether nothing of the loop is left (it is done, or an earlier attempt left it
        by ``break``), and the loop's place for `continue_loop`.

        Ends an earlier loop that the script has left (`end_left_loop`). Notes the new one, here and
        in `position`, and at its end whether the script left it by ``break``. Prints a line if an
        earlier attempt left it so, and a warning for a second loop of the same total. Raises
        UsageError if not `is_tracked`, inside another loop, or if `total` is no int.
        """
        _check_arguments(loop, total, is_tracked)
        self.end_left_loop(begins=True)
        if self.loop:
            raise UsageError(f"run.{loop} was called inside run.{self.loop}; accepted: one of them")
        # Three frames are not the script's: this one, contextlib's, and run.epochs or run.steps.
        last_site, self._site = self._site, (site := LoopSite(3))
        self._warn_of_same_total(loop, total, is_elsewhere=site != last_site)
        is_over = self._begin_loop(loop, total, position)
        try:
            yield is_over, site
        except GeneratorExit:  # the script has left the loop before its end
            if self._site is site and self.loop:  # else `end_left_loop` has noted the break
                self._note_break(_is_at_break())
            raise
        finally:
            if self._site is site:  # no later loop has begun
                self.loop = None

    def _warn_of_same_total(self, loop: Kind, total: int, is_elsewhere: bool) -> None:
        """Print a warning if the last loop was left by ``break``, and the loop that begins has the
        same kind and total and stands at another place of the script (`is_elsewhere`)."""
        was_broken = self.number in self._broken and self._is_left_by_break
        was_broken = was_broken and not sys.exc_info()[1]  # else the script begins it anew
        if is_elsewhere and was_broken and (loop, total) == (self._kind, self.total):
            self._say(
                f"WARNING: run.{loop}({total}) comes twice: a resume in the second one would begin"
                " in the first; accepted: loops of different totals"
            )

    def _begin_loop(self, loop: Kind, total: int, position: Position) -> bool:
        """Note that a loop begins, here and, if something of it is left, in `position`. Return
        whether nothing is left. Print a line for a loop that an earlier attempt left by ``break``.
        """
        if not self.has_looped:
            self._abandoned = position.abandoned
        self.number += not self.has_looped or (loop, total) != (self._kind, self.total)
        number, done = self.number, position.epoch if loop == "epochs" else position.step
        self._is_abandoned = done < total and self._abandoned.get(number) == (loop, total)
        is_over = done >= total or self._is_abandoned
        if self._is_abandoned:
            self._say(f"the loop of {total} {loop} was left before, by break")
        self.is_checkpoints = self._is_loop_of(position, loop, total, is_over)
        if not is_over:  # the script has not come back to the earlier loops that it left
            loops = {**position.abandoned, **self._broken}
            earlier = {n: entry for n, entry in loops.items() if n < number}
            self._abandoned, position.abandoned, position.loops = earlier, earlier, number
            position.loop = loop, total
        self.loop, self._kind, self.total = loop, loop, total
        self._outer_error = OuterError()
        return is_over

    def _is_loop_of(self, position: Position, loop: Kind, total: int, is_over: bool) -> bool:
        """Return whether `position` is in the loop that begins, or at its end.

        It is if both have one kind, and either one total or one number. With one total the numbers
        may differ, since a script may leave out earlier loops at a resume, but not if an earlier
        attempt left this loop by ``break``. With another total the loop must not be over
        (`is_over`).
        """
        if not position.loops:  # a fresh run, or an older checkpoint
            return not is_over
        kind, last_total = position.loop or (loop, total)
        is_its_number = self.number == position.loops
        if total == last_total:
            return kind == loop and (is_its_number or not self._is_abandoned)
        return kind == loop and is_its_number and not is_over

    def end_left_loop(self, begins: bool = False) -> None:
        """End the loop, and note the ``break``, if the script has left it while a name keeps the
        loop's generator, as a progress bar does. `begins`: the script is about to begin another
        loop. Does nothing where the break can't be seen (`LoopSite.is_left`)."""
        if self.loop and self._site and self._site.is_left(begins):
            self._note_break(by_break=True)
            self.loop = None

    def continue_loop(self, site: LoopSite, position: Position) -> bool:
        """Called when the script has asked the loop at `site` for another element. If the loop was
        taken for left, as between two parts of it (``islice(loop, 100)``), take that back, here and
        in `position`, and return True. Raise UsageError if a later loop has begun."""
        if self._site is not site:
            raise UsageError(
                "a loop of the run was asked for more after a later one had begun",
                hint="one `for` over run.epochs or run.steps, and the next one behind it",
            )
        site.move(3)  # this frame, that of `Run._go_on`, and that of run.epochs or run.steps
        if self.loop == "epochs":  # the next epoch may have its batches in another thread
            self._thread = None
        if self.loop:
            return False
        self.loop, position.is_behind = self._kind, False
        for loops in (self._broken, position.abandoned):
            loops.pop(self.number, None)
        return True

    def _note_break(self, by_break: bool) -> None:
        """Note that the script has left the present loop before its end: `by_break`, else by an
        exception."""
        self._is_left_by_break = by_break
        if self._kind:
            self._broken[self.number] = self._kind, self.total

    def is_before_loop_of(self, position: Position) -> bool:
        """Return whether the script is behind a loop, in none now, and `position` is in a later
        loop. Call `end_left_loop` first."""
        is_earlier = position.loops > self.number and position.loop != (self._kind, self.total)
        return self.has_looped and is_earlier and not self.loop

    def abandon_loops(self, position: Position) -> None:
        """Note in `position` that the script does not come back to the loops that it has left
        before their end, as it may after an error. ``run.load_best`` calls it: a call behind the
        loops shows this."""
        position.abandoned = {**position.abandoned, **self._broken}

    @property
    def has_looped(self) -> bool:
        """Whether a loop was begun."""
        return self.number > 0

    def total_steps(self, loader: Loader | None) -> int | None:
        """Return the number of the step at which the present loop, else the last one, ends, counted
        from the run's first step. Return None where the length of an epoch is not known."""
        if self.loop == "steps":
            return self.total
        return None if loader is None else loader.total_steps(self.total)

    def is_failing(self) -> bool:
        """Return whether an exception is being handled that was raised after the start of the run,
        or after the begin of its last loop: then it ends the script."""
        return self._outer_error.has_inner()

    def check_loader(self, has_loader: bool, is_tracked: bool) -> None:
        """Refuse a loader if the run has one, and after `track`."""
        if has_loader:
            raise UsageError(
                "the run has a training loader already, and its position belongs to that one",
                hint="for evaluation use run.shard",
            )
        if is_tracked:
            raise UsageError(
                "run.loader was called after run.track, which has to know the training set",
                hint="make the loader first",
            )

    def note_batch(self) -> None:
        """Note this thread as the one that takes batches; raise UsageError outside of a loop. The
        loader calls it before each batch but its first, by which a script may look at the data."""
        self._thread = threading.get_ident()
        if not self.loop:
            raise UsageError(
                "the training loader was iterated outside run.epochs",
                hint="write `for epoch in run.epochs(n):` around the loop over batches; for another"
                " pass over the data take run.shard",
            )

    def check_update(self, ends_step: bool) -> None:
        """Refuse an optimizer's step before the last micro-batch of the step (not `ends_step`)."""
        if not ends_step:
            raise UsageError(
                "optimizer.step() was called in the midst of accumulating gradients",
                hint="run.update(optimizer) waits for the last micro-batch; or ask run.ends_step",
            )

    def check_step(self, is_trained: bool) -> None:
        """Refuse ``run.step`` outside of a loop, with batches of another thread, and if
        `is_trained`: the present batch has had its step, or there is no batch yet."""
        if self._thread and not self._is_in_step():
            raise UsageError(
                "run.loader is iterated in another thread, ahead of the steps: a checkpoint would"
                " leave out batches; accepted: in the thread that calls run.step",
                hint="iterate it directly, and run.loader(…, num_workers=4, prefetch_factor=4)",
            )
        if not self.loop:
            raise UsageError(
                "run.step was called outside of run.epochs and run.steps",
                hint="a loop without epochs is `for step in run.steps(n):`",
            )
        if is_trained:
            raise UsageError(
                "run.step was called twice for one batch, or before the first one",
                hint="call it once per batch, behind all optimizers' steps, and before the next"
                " batch is fetched: run.loader fetches ahead by itself",
            )

    def _is_in_step(self) -> bool:
        """Return whether the last batch was asked for in this thread, or in the loop's thread."""
        is_loop_thread = self._site is not None and self._site.thread == self._thread
        return is_loop_thread or self._thread == threading.get_ident()

    def close_judgement(self, step: int) -> None:
        """Forget the step that ``run.best`` has judged; raise UsageError if it is not `step`, whose
        weights are about to be saved as the best ones. A second call does nothing: after a save
        that failed the next one counts."""
        judged_at, self.judged_at = self.judged_at, None
        if judged_at not in (None, step):
            raise UsageError(
                f"run.best has judged the weights of step {judged_at}, and the checkpoint would"
                f" have those of step {step}; accepted: a call behind the optimizer's step",
                hint="judge at the end of the epoch, or of the body of run.steps; within an epoch"
                " behind run.step, and without run.loader before it",
            )

    def check_body(self, is_trained: bool) -> None:
        """Refuse a body of ``run.steps`` that has ended without ``run.step``: not `is_trained`."""
        if not is_trained:
            raise UsageError(
                "the body of run.steps has ended without run.step()",
                hint="call it once in each, behind the optimizer's step",
            )


def _is_at_break() -> bool:
    """Return whether the script leaves its loop by ``break`` or ``return``, and not by an
    exception. Called by `CallOrder.enter_loop`, amid the closing of the loop's generator.

    ``break`` and ``return`` pop the loop's iterator from the stack, and so close the generator; the
    script is then at an instruction of the name POP_….
    """
    frame: FrameType | None = sys._getframe(2)  # the caller of `enter_loop`
    while frame and (is_generator(frame.f_code) or frame.f_globals is contextmanager.__globals__):
        frame = frame.f_back
    return frame is None or instruction_of(frame).startswith("POP_")


def _check_arguments(loop: Kind, total: object, is_tracked: bool) -> None:
    """Raise UsageError if `total` is no int, or not `is_tracked`."""
    if not isinstance(total, int):
        raise UsageError(f"run.{loop} was given {total!r}; accepted: a whole number")
    if not is_tracked:
        raise UsageError(
            "run.track was not called, or has raised an error: a checkpoint would hold nothing",
            hint="run.track(model=model, optimizer=optimizer) before the loop; let its error"
            " end the script",
        )


def check_tracked(objects: dict[str, Any], per_rank: Any, added: Any) -> None:
    """Raise UsageError unless the arguments `per_rank` and `added` of ``run.track`` are collections
    of names of tracked `objects`. `added` may also name parts of an object, as ``model.head``."""
    for argument, places in (("per_rank", per_rank), ("added", added)):
        is_list = isinstance(places, Collection) and not isinstance(places, str)
        names = list(map(str, places)) if is_list else []
        if argument == "added":  # the object's name is in front of the first dot
            names = [name.split(".")[0] for name in names]
        if not (is_list and set(names) <= set(objects)):
            raise UsageError(
                f"{argument} is {places!r}; accepted: a tuple of names of tracked objects, here of"
                f" {', '.join(objects) or 'none'}",
                hint=f"run.track(model=model, loader=loader, {argument}=('loader',))",
            )
