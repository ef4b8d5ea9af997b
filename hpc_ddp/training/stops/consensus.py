"""Saves and stops: the knowledge of each rank becomes one decision of all ranks."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint.schedule import SaveSchedule
from hpc_ddp.training.process.rank_messages import Control
from hpc_ddp.training.stops.signals import DEADLINE, NONE, Notices
from hpc_ddp.training.telemetry.step_timing import StepTimer

PERIOD_US = 200_000  # between exchanges: one costs up to 0.5 ms, so all well under 1 %
LEAST_STEP_US = 500  # shorter steps count as so long: at most 400 pass until the next exchange

MARGIN_S = 5.0  # to tear down, and for clocks that differ between hosts
# The most of the attempt's time that is kept free: for one more pause, and for a save, since a save
# on a disk in trouble says little of the next one.
PAUSE_SHARE, SAVE_SHARE = 0.05, 0.25
MOST_STEPS = 2 * (PERIOD_US // LEAST_STEP_US) + 1  # the most steps until a stop decided now


@dataclass(frozen=True)
class Decision:
    """The result of one exchange, the same on all ranks. `reason` is `NONE`, or why they must stop:
    a key of `signals.REASONS`.

    `save`: all ranks save the state. `gather`: the ranks send their step times to rank 0.
    """

    reason: int = NONE
    save: bool = False
    gather: bool = False

    def combine_with(self, later: Decision) -> Decision:
        """Return one decision for this one and a `later` one: the more urgent reason, a save if
        either has one, and no `gather`, which `StopConsensus` itself carries out."""
        return Decision(max(self.reason, later.reason), self.save or later.save)


def next_period(current: int, step_us: int) -> int:
    """Return the number of steps until the next exchange: about 0.2 s of steps of `step_us`
    microseconds, at least 1.

    It is at most twice the `current` number: after some quick steps in a row, slow ones must not
    make the exchange late.
    """
    return max(1, min(2 * current, PERIOD_US // max(step_us, LEAST_STEP_US)))


class StepTimes:
    """The durations of the last steps, as an estimate of the next ones.

    A pause (an evaluation, a compilation, a disk that stalls) is as long as a thousand steps, and
    comes once in a thousand steps. One pause is expected before a stop, not one in each step.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=MOST_STEPS)  # seconds of the last steps
        self._is_first = True  # no step was added
        self.longest_pause_s = 0.0

    def add(self, seconds: float) -> None:
        """Count the seconds of a step, also as those of a pause, which may be the longest one. The
        first step counts only as a pause: it compiles, allocates and opens."""
        if not self._is_first:
            self._recent.append(seconds)
        self._is_first = False
        self.add_pause(seconds)

    def add_pause(self, seconds: float) -> None:
        """Count the seconds of a pause."""
        self.longest_pause_s = max(self.longest_pause_s, seconds)

    def expect(self, steps: int, longest_pause_s: float) -> float:
        """Return the seconds that `steps` steps may take, one of which is a pause.

        The other steps take the average of the last `steps` steps, without the slowest of these.
        The pause takes as long as the longest so far, but at most `longest_pause_s`, and at least a
        step. Without earlier steps only the pause counts.
        """
        recent = list(islice(reversed(self._recent), steps))
        slowest_s = max(recent, default=0.0)
        count = len(recent) - 1
        step_s = (sum(recent) - slowest_s) / count if count > 0 else slowest_s
        return (steps - 1) * step_s + max(step_s, min(self.longest_pause_s, longest_pause_s))


class StopConsensus:
    """Makes decisions of all ranks from the notices, the save schedule and the times of each rank.

    A few integers travel by a MAX all-reduce while steps compute. The values of one exchange are
    read at the next one, so that no step waits for them. Exchanges happen at the same steps on all
    ranks, since their period is computed from reduced values only.

    `control` carries messages between the ranks. `notices` has this rank's reason to stop, and the
    end time, in unix seconds: None on a rank that does not watch the time, or without a limit.
    `timer` gathers step times where a decision asks for it; without a timer nothing is gathered.
    `exchanges` counts the exchanges.

    At an exchange the host waits until `device` has done the work that was queued at the exchange
    before. Else steps of few launches, as with CUDA graphs, would be queued hundreds of steps
    ahead: their times would not be the device's, and a stop would come as many steps late.
    """

    def __init__(
        self,
        control: Control,
        notices: Notices,
        schedule: SaveSchedule,
        timer: StepTimer | None = None,
        device: torch.device = devices.CPU,
    ) -> None:
        self._control, self._timer, self._device = control, timer, device
        self._queued: torch.Event | None = None  # behind the work queued at the last exchange
        self._notices, self._schedule = notices, schedule
        self._stepped_at = time.monotonic()  # when the step under way began
        self._started_at = time.time()  # when the attempt began, in unix seconds
        self.exchanges = 0  # the same number on all ranks
        self._period = 1  # steps from one exchange to the next
        self._since_exchange: list[float] = []  # seconds of each step since the last exchange
        self._pending: tuple[torch.Tensor, Any] | None = None  # values and work of an all-reduce
        self._times = StepTimes()

    def note_step(self, step: int, wait_for_all: bool = False) -> Decision:
        """Note that `step` steps of the run are done, and return the decision of all ranks. All
        ranks call it after each step; raise RuntimeError if a peer is gone.

        With `wait_for_all` the decision is that of `decide_now`, as before the last step of an
        epoch, where a stop would wait for the script's code at the epoch's end. Else it is that of
        the last exchange, if a new exchange is due, or an empty one. A save that the schedule has
        at this step is added.
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
        if self._schedule.note_step(step):
            return Decision(decision.reason, save=True)
        return decision

    def decide_now(self) -> Decision:
        """Make an exchange, wait for it (some 0.2 ms), and return the decision of all ranks by all
        values up to now. All ranks call it; raise RuntimeError if a peer is gone."""
        first = self._exchange()
        return first.combine_with(self._take_decision())

    def restart_step(self) -> None:
        """Start the clock of a step; the time before, such as that of a save, does not count."""
        self._stepped_at = time.monotonic()

    def end_pause(self) -> None:
        """Start the clock of a step; the time since it was last started was a pause, and as long a
        pause may come again."""
        self._times.add_pause(time.monotonic() - self._stepped_at)
        self.restart_step()

    def _exchange(self) -> Decision:
        """Return the decision of the last exchange (`_take_decision`), and begin the next exchange
        with this rank's values; a collective. Raise RuntimeError if a peer is gone."""
        self._wait_for_device()
        decision = self._take_decision()
        self.exchanges += 1
        # A save that has just been decided is not requested again.
        save = self._schedule.is_due() and not decision.save
        mean_s = sum(self._since_exchange) / max(len(self._since_exchange), 1)
        gather = self._timer is not None and self._timer.is_due()
        message = [self._find_reason(), int(save), int(gather), int(mean_s * 1e6)]
        values = torch.tensor(message, dtype=torch.int64, device="cpu")
        self._pending = (values, self._control.start_max(values))
        self._since_exchange.clear()
        return decision

    def _wait_for_device(self) -> None:
        """Wait until the device has done the work that was queued at the last exchange, about 0.2 s
        ago; at least a step of work is left then. Mark the work queued by now, for the next call.
        Do nothing for a CPU, and for a device that the process has not opened."""
        if devices.is_used(self._device):
            if self._queued is not None and not self._queued.query():
                self._queued.synchronize()
            self._queued = devices.mark(self._device)

    def _take_decision(self) -> Decision:
        """Wait for the last exchange, set the period to the next one, and return the decision; an
        empty one if it was returned before, or there was no exchange.

        The timer reports its step times here, and gathers new ones if the decision asks for it: all
        ranks call this at the same step. Raise RuntimeError if a peer is gone.
        """
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

    def _find_reason(self) -> int:
        """Return this rank's reason to stop: that of its notices, else `DEADLINE` where a save that
        is decided at a later exchange might not end before the end time, else `NONE`."""
        end_time = self._notices.end_time
        if self._notices.reason == NONE and end_time is not None:
            # The stop comes at most two exchanges, and a step, after it is requested.
            steps = 2 * self._period + 1
            attempt_s = end_time - self._started_at
            save_s = min(1.5 * self._schedule.save_s(), SAVE_SHARE * attempt_s)
            steps_s = self._times.expect(steps, PAUSE_SHARE * attempt_s)
            if time.time() + MARGIN_S + save_s + steps_s >= end_time:
                return DEADLINE
        return self._notices.reason
