"""When a checkpoint is saved."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.journal.events import (
    CheckpointSaved,
    Finished,
    FirstStep,
    JournalEvent,
    Stopped,
)
from hpc_ddp.core.journal.journal import by_attempt, last_event

if TYPE_CHECKING:
    from hpc_ddp.training.checkpoint.save import Checkpoints

FIRST_SAVE_S = 5.0  # a guess, until a save has been measured
RETRY_AFTER_S = 30.0  # from a save that fails to the next try, at most
FIRST_AUTO_S = 30.0  # the first save is made early, to measure what one costs
LONGEST_AUTO_S = 3600.0  # the longest interval that "auto" chooses
PRIOR_S = 86_400.0  # as if one failure had been seen in a day


@dataclass
class Best:
    """The best value so far (None before the first), the step of its checkpoint (None while it has
    none), and how many values came after it."""

    value: float | None = None
    step: int | None = None
    stale: int = 0
    higher: bool = True  # greater values are better


class BestValues:
    """The best value of a run, and the one before it, which is the best again where the weights of
    a better one could not be saved."""

    def __init__(self, best: Best | None = None) -> None:
        """Begin with `best`, that of the checkpoint that was loaded; None without a checkpoint."""
        self.best = best or Best()
        self._saved = self.best  # the newest best value that has a checkpoint
        self._in_save: Best | None = None  # the best value whose save is under way
        self._unsaved_at: int | None = None  # the step of `best`, if its save has failed

    def judge(self, value: float, higher: bool) -> bool:
        """Compare `value` with `best`. If it is better, put it into `best`, without a checkpoint
        yet; else add 1 to `best.stale`. Return whether it is better. `higher`: greater values are
        better. NaN is never better; the first value that is a number is."""
        best = self.best
        beats = best.value is None or (value > best.value if higher else value < best.value)
        is_best = beats and not math.isnan(value)
        self._saved = replace(self._saved, stale=self._saved.stale + 1)
        if self._in_save is not None:
            self._in_save = replace(self._in_save, stale=self._in_save.stale + 1)
        if is_best:
            self.best, self._unsaved_at = Best(value, higher=higher), None
        else:
            self.best = replace(best, stale=best.stale + 1)
        return is_best

    def begin_save(self, step: int) -> float | None:
        """Note that the save of a step begins: a best value without a checkpoint gets this one.

        If an earlier save of the best value has failed, at another step, its weights are gone: the
        best value that was saved is `best` again. Return the value that was lost so, else None.
        """
        lost = None
        if self._unsaved_at not in (None, step):
            lost, self.best = self.best.value, self._saved
        self._unsaved_at = None
        if self.best.step is None and self.best.value is not None:
            self.best.step = step
            self._in_save = self.best
        return lost

    def end_save(self, done: bool) -> None:
        """Note that the save of a best value, if one is under way, is `done`, or else has failed.
        After a done save that value is `best` again if the save of a later one fails. After a
        failed save `best` has no checkpoint, unless a later value has become `best`."""
        in_save, self._in_save = self._in_save, None
        is_best = in_save is not None and in_save.step == self.best.step
        if in_save and done:
            self._saved = self.best if is_best else in_save
        elif is_best:
            self._unsaved_at, self.best.step = self.best.step, None


def young_daly(stall_s: float, between_failures_s: float) -> float:
    """Return the interval between saves, in seconds, that loses the least time, where a save holds
    the training up for `stall_s` and failures are `between_failures_s` apart on average.

    sqrt(2 * stall * mean time between failures): J. W. Young, A first order approximation to the
    optimum checkpoint interval, CACM 17 (1974); J. T. Daly, FGCS 22 (2006), lowest order.
    """
    return math.sqrt(2 * stall_s * between_failures_s)


def time_between_failures(events: Sequence[JournalEvent]) -> float:
    """Return the mean time between failures, in seconds, of a run's attempts in `events`, with one
    failure in `PRIOR_S` seconds added to theirs: without attempts the result is `PRIOR_S`.

    A failure is an attempt that neither stopped nor finished: it lost its steps since its last
    save. Only attempts that made a step count.
    """
    spent_s, failures = PRIOR_S, 1
    for of_attempt in by_attempt(events).values():
        if last_event(of_attempt, FirstStep):
            times = [event.time for event in of_attempt]
            spent_s += max(times) - min(times)
            if last_event(of_attempt, Stopped, Finished) is None:
                failures += 1
    return spent_s / failures


def slowest_save(events: Sequence[JournalEvent]) -> float:
    """Return how long the slowest of the saves in `events` took, in seconds; `FIRST_SAVE_S` if
    there was none.

    The time for which a save held the training up is included: the first save of a process also
    locks memory, which takes CUDA around 0.4 s per GB. Time in which the training waited for the
    writing counts twice: too long is the safe side.
    """
    saves = [e.stall_s + e.write_s for e in events if isinstance(e, CheckpointSaved)]
    return max(saves, default=FIRST_SAVE_S)


class SaveSchedule:
    """Decides when a save is due, by rank 0's clock and by the number of steps.

    Parameters
    ----------
    checkpoints
        the run's, which tell how long saves take, and whether one is under way or has failed
    rank
        this process's
    every
        seconds between saves, ``"auto"`` for the best interval, None for no clock
    every_steps
        a save after every so many optimizer steps as well; None: no such saves
    slowest_save_s
        seconds to expect of a save until one has been measured; only rank 0 uses it
    failure_interval_s
        mean time between failures, in seconds; only rank 0 uses it
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        rank: int,
        every: float | str | None = None,
        every_steps: int | None = None,
        slowest_save_s: float = FIRST_SAVE_S,
        failure_interval_s: float = PRIOR_S,
    ) -> None:
        self._checkpoints, self._rank = checkpoints, rank
        self._every_steps = every_steps
        self._newest_step: int | None = None  # of the last call of `note_step`
        self._is_auto = isinstance(every, str)  # and the interval has not been chosen yet
        self._every_s = FIRST_AUTO_S if isinstance(every, str) else every
        self._between_failures_s = failure_interval_s
        self._save_began = time.monotonic()  # the last one
        self._slowest_before_s = slowest_save_s

    def note_step(self, step: int) -> bool:
        """Note that `step` is done, and return whether a save is due after it by `every_steps`; the
        same on all ranks.

        A library that counts several steps at once calls it after some steps only: a save is due if
        a multiple of `every_steps` was reached or passed since the last call. At the first call of
        a process a save is due only if `step` is a multiple.
        """
        newest, self._newest_step = self._newest_step, step
        if self._every_steps is None:
            return False
        previous = step - 1 if newest is None else newest
        return previous // self._every_steps < step // self._every_steps

    def is_due(self) -> bool:
        """Return whether a save is due by rank 0's clock; False on other ranks, and while a save is
        under way.

        After a failed save the next one is due `RETRY_AFTER_S` seconds from the begin of the failed
        one at the latest, even without a clock.
        """
        if self._rank != 0 or self._checkpoints.in_flight:
            return False
        since_s = time.monotonic() - self._save_began
        every_s = self._every_s
        if self._checkpoints.failed:  # None and 0 count as `RETRY_AFTER_S`
            every_s = min(self._every_s or RETRY_AFTER_S, RETRY_AFTER_S)
        return every_s is not None and since_s >= every_s

    def note_save(self) -> None:
        """Note that a save begins, from which the clock counts. With ``"auto"`` rank 0 chooses and
        prints the interval, once, as soon as an earlier save has been measured."""
        self._save_began = time.monotonic()
        if self._is_auto and self._rank == 0 and self._checkpoints.slowest_save_s:
            self._is_auto = False
            self._choose_interval(self._checkpoints.stall_s)

    def save_s(self) -> float:
        """Return how long a save that begins now may take until it is durable, in seconds: as long
        as the slowest one of this attempt, or the `slowest_save_s` of the start before the first
        one. While a save is under way, for which the new one waits, it is twice as long."""
        slowest_s = self._checkpoints.slowest_save_s or self._slowest_before_s
        return slowest_s * (2 if self._checkpoints.in_flight else 1)

    def _choose_interval(self, stall_s: float) -> None:
        """Set the interval between saves by `young_daly`, for saves that hold the training up for
        `stall_s` seconds, and print it. It is four times the slowest save at least, and
        `LONGEST_AUTO_S` at most."""
        best_s = young_daly(stall_s, self._between_failures_s)
        # The disk is to be idle for most of the time, whatever the formula says.
        least_s = 4 * self._checkpoints.slowest_save_s
        self._every_s = every_s = min(max(best_s, least_s), LONGEST_AUTO_S)
        # Shares of the time: in saves, and lost by failures, half an interval each on average.
        cost = stall_s / every_s + every_s / 2 / self._between_failures_s
        say(
            f"saving every {every_s:.0f} s: a save holds the training up for {stall_s:.3f} s, and a"
            f" failure is expected every {self._between_failures_s / 3600:.1f} h; together"
            f" {100 * cost:.2g} % of the time"
        )


# --- the older ones ------------------------------------------------------------------------
