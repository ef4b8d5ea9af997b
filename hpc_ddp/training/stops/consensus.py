"""When to save and when to stop: what each rank knows becomes one decision of all ranks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.journal.events import (
    CheckpointSaved,
    Finished,
    FirstStep,
    JournalEvent,
    Stopped,
)
from hpc_ddp.core.journal.journal import by_attempt, last_event
from hpc_ddp.training.checkpoint.saver import Checkpoints
from hpc_ddp.training.process.process_group import Control
from hpc_ddp.training.stops.signals import DEADLINE, NONE, Notices
from hpc_ddp.training.telemetry.step_timing import StepTimer

PERIOD_US = 200_000  # an exchange costs up to 0.5 ms: well under 1 % at one per 0.2 s
LEAST_STEP_US = 500  # so that never more than 400 steps pass, should they turn slow

MARGIN_S = 5.0  # to tear down, and for clocks that differ between hosts
PAUSE_SHARE = 0.05  # of the attempt's time: the most that is kept free for one more pause,
SAVE_SHARE = 0.25  # and for a save: one that met a disk in trouble says little of the next
MOST_STEPS = 2 * (PERIOD_US // LEAST_STEP_US) + 1  # until a stop that is decided now

FIRST_SAVE_S = 5.0  # a guess, until a save has been measured
RETRY_AFTER_S = 30.0
FIRST_AUTO_S = 30.0  # the first save is made early, to measure what one costs
LONGEST_AUTO_S = 3600.0
PRIOR_S = 86_400.0  # as if one failure had been seen in a day


@dataclass(frozen=True)
class Decision:
    """The result of one exchange, the same on all ranks. `reason` is `NONE` unless they must stop.

    `gather`: the ranks send what they have measured of themselves to rank 0.
    """

    reason: int = NONE
    save: bool = False
    gather: bool = False


def next_period(current: int, step_us: int) -> int:
    """Return the number of steps until the next exchange: about 0.2 s of `step_us` each.

    It at most doubles, so that some quick steps in a row do not make the ranks deaf for long
    should the following ones be slow.
    """
    return max(1, min(2 * current, PERIOD_US // max(step_us, LEAST_STEP_US)))


class StepTimes:
    """How long the next steps may take, by the last ones.

    A pause (an evaluation, a compilation, a disk that stalls) is as long as a thousand steps, and
    comes once in a thousand of them. It is expected once in what is left, not at each step.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=MOST_STEPS)
        self._is_first = True
        self.longest_pause_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a step. The first one compiles, allocates and opens: it is a pause, no step."""
        if not self._is_first:
            self._recent.append(seconds)
        self._is_first = False
        self.add_pause(seconds)

    def add_pause(self, seconds: float) -> None:
        self.longest_pause_s = max(self.longest_pause_s, seconds)

    def expect(self, steps: int, longest_pause_s: float) -> float:
        """Return the seconds that `steps` steps and a pause may take, as the last ones did.

        The pause is as long as the longest so far, and at most `longest_pause_s`.
        """
        recent = list(islice(reversed(self._recent), steps))
        slowest_s = max(recent, default=0.0)
        count = len(recent) - 1
        step_s = (sum(recent) - slowest_s) / count if count > 0 else slowest_s
        return (steps - 1) * step_s + max(step_s, min(self.longest_pause_s, longest_pause_s))


class StopConsensus:
    """Turns what each rank knows into decisions that all ranks share.

    A few integers travel by a MAX all-reduce while steps compute. A value sent at one exchange is
    read at the next, so that no step waits for it; both happen at the same steps on all ranks,
    since the period comes from reduced values only.

    `notices` has the end time, in unix seconds, on the ranks that are to watch it: None means no
    limit, or not this rank.
    """

    def __init__(
        self,
        control: Control,
        notices: Notices,
        schedule: SaveSchedule,
        timer: StepTimer | None = None,
    ) -> None:
        self._control, self._timer = control, timer
        self._notices, self._schedule = notices, schedule
        self._stepped_at, self._started_at = time.monotonic(), time.time()
        self.exchanges = 0  # so far, the same number on all ranks
        self._period = 1  # steps from one exchange to the next
        self._since_exchange: list[float] = []  # the durations of steps, in seconds
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._times = StepTimes()

    def step_done(self, step: int, wait_for_all: bool = False) -> Decision:
        """Count a step, and return what all ranks do after it.

        `wait_for_all` see `decide_now`: before the last step of an epoch, where a stop would have
        to wait for what the script does at the epoch's end.
        """
        now = time.monotonic()
        self._since_exchange.append(now - self._stepped_at)
        self._times.add(now - self._stepped_at)
        self._stepped_at = now
        decision = Decision()
        if wait_for_all:
            decision = self.decide_now()
        elif len(self._since_exchange) >= self._period:
            decision = self._exchange()
        if self._schedule.after_step(step):
            return Decision(decision.reason, save=True)
        return decision

    def decide_now(self) -> Decision:
        """Return what all ranks do by all that any of them knows; they wait for each other, some
        0.2 ms."""
        first = self._exchange()
        second = self._read()
        return Decision(max(first.reason, second.reason), first.save or second.save)

    def restart_step(self) -> None:
        """Start the clock of a step, after something that is no part of it, such as a save."""
        self._stepped_at = time.monotonic()

    def end_pause(self) -> None:
        """Start the clock of a step; what came before was a pause, of which another may come."""
        self._times.add_pause(time.monotonic() - self._stepped_at)
        self.restart_step()

    def _exchange(self) -> Decision:
        """Read the last exchange and send the next."""
        decision = self._read()
        self.exchanges += 1
        # A save that has just been decided is not due once more.
        save = self._schedule.is_due() and not decision.save
        mean_s = sum(self._since_exchange) / max(len(self._since_exchange), 1)
        gather = self._timer is not None and self._timer.is_due()
        word = [self._reason(), int(save), int(gather), int(mean_s * 1e6)]
        values = torch.tensor(word, device="cpu")
        self._pending = (values, self._control.start_max(values))
        self._since_exchange.clear()
        return decision

    def _read(self) -> Decision:
        """Return the result of the last exchange; here, at the same step on all ranks, they gather
        figures."""
        decision = Decision()
        if self._pending is not None:
            values, work = self._pending
            self._pending = None
            work.wait()
            reason, save, gather, step_us = values.tolist()
            self._period = next_period(self._period, step_us)
            decision = Decision(reason, bool(save), bool(gather))
        if self._timer:
            self._timer.report()
            if decision.gather:
                self._timer.gather()
        return decision

    def _reason(self) -> int:
        end_time = self._notices.end_time
        if self._notices.reason == NONE and end_time is not None:
            # The stop comes at most two exchanges after it is requested.
            steps = 2 * self._period + 1
            attempt_s = end_time - self._started_at
            save_s = min(1.5 * self._schedule.save_s(), SAVE_SHARE * attempt_s)
            steps_s = self._times.expect(steps, PAUSE_SHARE * attempt_s)
            if time.time() + MARGIN_S + save_s + steps_s >= end_time:
                return DEADLINE
        return self._notices.reason


def young_daly(stall_s: float, between_failures_s: float) -> float:
    """Return the interval between saves, in seconds, that loses the least time.

    sqrt(2 * stall * mean time between failures): J. W. Young, A first order approximation to the
    optimum checkpoint interval, CACM 17 (1974); J. T. Daly, FGCS 22 (2006), lowest order.
    """
    return math.sqrt(2 * stall_s * between_failures_s)


def between_failures(events: Sequence[JournalEvent]) -> float:
    """Return the mean time between failures in seconds, from a run's earlier attempts.

    A failure is an attempt that ended without a stop: it lost what came after its last save.
    """
    spent, failures = PRIOR_S, 1
    for of_attempt in by_attempt(events).values():
        if last_event(of_attempt, FirstStep):
            times = [event.time for event in of_attempt]
            spent += max(times) - min(times)
            failures += last_event(of_attempt, Stopped, Finished) is None
    return spent / failures


def slowest_save(events: Sequence[JournalEvent]) -> float:
    """Return how long the slowest save of a run's earlier attempts took, in seconds."""
    saves = [event.write_s for event in events if isinstance(event, CheckpointSaved)]
    return max(saves, default=FIRST_SAVE_S)


class SaveSchedule:
    """The clock of the saves. Rank 0's counts.

    Parameters
    ----------
    every
        seconds between saves, ``"auto"`` for the best interval, None for no clock
    every_steps
        a save after every so many optimizer steps as well
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
        self._steps = every_steps
        self._auto = isinstance(every, str)
        self._every = FIRST_AUTO_S if isinstance(every, str) else every
        self._between_failures_s = failure_interval_s
        self._last = time.monotonic()
        self._slowest_before_s = slowest_save_s

    def after_step(self, step: int) -> bool:
        """Return whether a save belongs to this step; the same on all ranks."""
        return self._steps is not None and step % self._steps == 0

    def is_due(self) -> bool:
        """Return whether rank 0 wants a save. One that has failed is tried again soon.

        Not while one is under way: a clock that runs faster than the disk skips beats.
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
        """Start the clock anew after a save has begun."""
        self._last = time.monotonic()
        if self._auto and self._rank == 0 and self._checkpoints.slowest_save_s:
            self._auto = False
            self._choose(self._checkpoints.stall_s)

    def save_s(self) -> float:
        """Return how long a save may take from now until it is durable, in seconds."""
        slowest = self._checkpoints.slowest_save_s or self._slowest_before_s
        return slowest * (2 if self._checkpoints.in_flight else 1)

    def _choose(self, stall_s: float) -> None:
        best = young_daly(stall_s, self._between_failures_s)
        # The disk is to be idle for most of the time, whatever the formula says.
        self._every = every = min(max(best, 4 * self._checkpoints.slowest_save_s), LONGEST_AUTO_S)
        cost = stall_s / every + every / 2 / self._between_failures_s
        say(
            f"saving every {every:.0f} s: a save holds the training up for {stall_s:.3f} s, and a"
            f" failure is expected every {self._between_failures_s / 3600:.1f} h; together"
            f" {100 * cost:.2g} % of the time"
        )
