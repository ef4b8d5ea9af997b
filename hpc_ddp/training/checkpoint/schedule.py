"""When a checkpoint is saved, and which of the older ones stay."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_ddp.core.checkpoints import candidates, milestones, published, step_of
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.journal.events import (
    CheckpointSaved,
    Finished,
    FirstStep,
    JournalEvent,
    Stopped,
)
from hpc_ddp.core.journal.journal import by_attempt, last_event
from hpc_ddp.training.checkpoint.storage.disk import remove

if TYPE_CHECKING:
    from hpc_ddp.training.checkpoint.save import Checkpoints

FIRST_SAVE_S = 5.0  # a guess, until a save has been measured
RETRY_AFTER_S = 30.0  # from a save that fails to the next try, at most
FIRST_AUTO_S = 30.0  # the first save is made early, to measure what one costs
LONGEST_AUTO_S = 3600.0  # the longest interval that "auto" chooses
PRIOR_S = 86_400.0  # as if one failure had been seen in a day
LEAST = 2  # checkpoints, the newest, that are kept even where there is no space for another


def young_daly(stall_s: float, between_failures_s: float) -> float:
    """Return the interval between saves, in seconds, that loses the least time, where a save holds
    the training up for `stall_s` and failures are `between_failures_s` apart on average.

    sqrt(2 * stall * mean time between failures): J. W. Young, A first order approximation to the
    optimum checkpoint interval, CACM 17 (1974); J. T. Daly, FGCS 22 (2006), lowest order.
    """
    return math.sqrt(2 * stall_s * between_failures_s)


def between_failures(events: Sequence[JournalEvent]) -> float:
    """Return the mean time between failures in seconds, from a run's earlier attempts, as if there
    had been one more in a time of `PRIOR_S`; so that is the result without any.

    A failure is an attempt that neither stopped nor finished: it lost what came after its last
    save. Only attempts that made a step count.
    """
    spent, failures = PRIOR_S, 1
    for of_attempt in by_attempt(events).values():
        if last_event(of_attempt, FirstStep):
            times = [event.time for event in of_attempt]
            spent += max(times) - min(times)
            failures += last_event(of_attempt, Stopped, Finished) is None
    return spent / failures


def slowest_save(events: Sequence[JournalEvent]) -> float:
    """Return how long the slowest save of a run's earlier attempts took, in seconds; `FIRST_SAVE_S`
    without any.

    With the time for which it held the training up: the first one of a process also locks its
    memory, which takes CUDA around 0.4 s per GB. Where the training waited for the writing, that
    counts twice: too long is the safe side.
    """
    saves = [e.stall_s + e.write_s for e in events if isinstance(e, CheckpointSaved)]
    return max(saves, default=FIRST_SAVE_S)


class SaveSchedule:
    """Decides when a save is due, by rank 0's clock and by the number of steps.

    Parameters
    ----------
    checkpoints
        the saves that are asked for their durations and results
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
        self._newest_step: int | None = None  # of the last call of `after_step`
        self._auto = isinstance(every, str)
        self._every = FIRST_AUTO_S if isinstance(every, str) else every
        self._between_failures_s = failure_interval_s
        self._last = time.monotonic()  # when the last save began
        self._slowest_before_s = slowest_save_s

    def after_step(self, step: int) -> bool:
        """Return whether a save belongs to this step, by `every_steps`; the same on all ranks.

        It is called after each step, or, where a library counts several at once, after some: the
        save then belongs to the first of these that has reached or passed a multiple. At the first
        call of a process only a multiple itself counts.
        """
        before, self._newest_step = self._newest_step, step
        if self._every_steps is None:
            return False
        before = step - 1 if before is None else before
        return step // self._every_steps > before // self._every_steps

    def is_due(self) -> bool:
        """Return whether rank 0's clock wants a save; False on other ranks.

        Not while one is under way: a clock that runs faster than the disk skips beats. After one
        has failed the next is due `RETRY_AFTER_S` from its begin at the latest, even without a
        clock.
        """
        if self._rank != 0 or self._checkpoints.in_flight:
            return False
        since = time.monotonic() - self._last
        every = (
            min(self._every or RETRY_AFTER_S, RETRY_AFTER_S)
            if self._checkpoints.failed
            else self._every
        )
        return every is not None and since >= every

    def saved(self) -> None:
        """Start the clock anew; called when a save has begun. With ``"auto"``, rank 0 chooses and
        prints the interval, once, as soon as a save is measured."""
        self._last = time.monotonic()
        if self._auto and self._rank == 0 and self._checkpoints.slowest_save_s:
            self._auto = False
            self._choose_interval(self._checkpoints.stall_s)

    def save_s(self) -> float:
        """Return how long a save may take from now until it is durable, in seconds: as long as the
        slowest of this attempt, before its first as given; twice that behind one under way."""
        slowest = self._checkpoints.slowest_save_s or self._slowest_before_s
        return slowest * (2 if self._checkpoints.in_flight else 1)

    def _choose_interval(self, stall_s: float) -> None:
        """Set the interval by `young_daly` for saves that hold the training up for `stall_s`, to
        four times the slowest save at least and `LONGEST_AUTO_S` at most; print it."""
        best = young_daly(stall_s, self._between_failures_s)
        # The disk is to be idle for most of the time, whatever the formula says.
        self._every = every = min(max(best, 4 * self._checkpoints.slowest_save_s), LONGEST_AUTO_S)
        cost = stall_s / every + every / 2 / self._between_failures_s
        say(
            f"saving every {every:.0f} s: a save holds the training up for {stall_s:.3f} s, and a"
            f" failure is expected every {self._between_failures_s / 3600:.1f} h; together"
            f" {100 * cost:.2g} % of the time"
        )


# --- the older ones ------------------------------------------------------------------------


@dataclass(frozen=True)
class Retention:
    """The checkpoints that stay: the newest `last`, and the first one of every `every` steps."""

    last: int
    every: int | None = None


def prune(folder: Path, keep: Retention, pinned: Iterable[int] = ()) -> None:
    """Remove the checkpoints in `folder` that `keep` does not name, and all `.old-` ones; call it
    after a newer one is durable.

    `pinned` are steps that stay whatever their age: the best one. Raise OSError if the folder can't
    be listed; a checkpoint that can't be removed stays.
    """
    newest_first = published(folder)
    stays = set(newest_first[: keep.last])
    stays |= {path for path in newest_first if step_of(path) in pinned}
    stays |= milestones(newest_first, keep.every)
    for path in candidates(folder):
        if path not in stays:
            remove(path)
