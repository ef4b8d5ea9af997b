"""When to save and when to stop: what each rank knows becomes one decision of all ranks."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint.schedule import SaveSchedule
from hpc_ddp.training.process.control import Control
from hpc_ddp.training.stops.signals import DEADLINE, NONE, Notices
from hpc_ddp.training.telemetry.step_timing import StepTimer

PERIOD_US = 200_000  # an exchange costs up to 0.5 ms: well under 1 % at one per 0.2 s
LEAST_STEP_US = 500  # so that never more than 400 steps pass, should they turn slow

MARGIN_S = 5.0  # to tear down, and for clocks that differ between hosts
PAUSE_SHARE = 0.05  # of the attempt's time: the most that is kept free for one more pause,
SAVE_SHARE = 0.25  # and for a save: one that met a disk in trouble says little of the next
MOST_STEPS = 2 * (PERIOD_US // LEAST_STEP_US) + 1  # until a stop that is decided now


@dataclass(frozen=True)
class Decision:
    """The result of one exchange, the same on all ranks. `reason` is `NONE` unless they must stop.

    `save`: all save the state. `gather`: the ranks send what they have measured of themselves to
    rank 0.
    """

    reason: int = NONE
    save: bool = False
    gather: bool = False

    def joined(self, later: Decision) -> Decision:
        """Return the more urgent reason of both, and a save if one asks for it; never `gather`,
        which is carried out where it is read."""
        return Decision(max(self.reason, later.reason), self.save or later.save)


def next_period(current: int, step_us: int) -> int:
    """Return the number of steps until the next exchange: about 0.2 s of `step_us` microseconds
    each.

    It at most doubles `current`, so that some quick steps in a row do not make the ranks deaf for
    long should the following ones be slow.
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
        """Count a step of so many seconds, which may be the longest pause as well. The first one is
        that only: it compiles, allocates and opens."""
        if not self._is_first:
            self._recent.append(seconds)
        self._is_first = False
        self.add_pause(seconds)

    def add_pause(self, seconds: float) -> None:
        """Count a pause, in seconds."""
        self.longest_pause_s = max(self.longest_pause_s, seconds)

    def expect(self, steps: int, longest_pause_s: float) -> float:
        """Return the seconds that `steps` steps may take, one of them with a pause.

        The others are as long as the last `steps` steps on average, without the slowest. The pause
        is as long as the longest so far, but at most `longest_pause_s`, and at least a step.
        Without earlier steps only the pause counts.
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

    `notices` has this rank's reason to stop, and the end time, in unix seconds, on the ranks that
    are to watch it: None means no limit, or not this rank. `timer` gathers figures where a decision
    asks for it; None: nothing is gathered.

    At an exchange the host waits until `device` has done what it had been given up to the one
    before. A step of few launches, as with CUDA graphs, would else be queued hundreds of steps
    ahead: their times would not be the device's, and a stop would come as much later.
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
        self._queued: torch.Event | None = None  # all that the device had been given by an exchange
        self._notices, self._schedule = notices, schedule
        self._stepped_at = time.monotonic()  # when the step under way began
        self._started_at = time.time()  # of the attempt, in unix seconds
        self.exchanges = 0  # so far, the same number on all ranks
        self._period = 1  # steps from one exchange to the next
        self._since_exchange: list[float] = []  # the durations of steps, in seconds
        self._pending: tuple[torch.Tensor, Any] | None = None  # values and work under way
        self._times = StepTimes()

    def step_done(self, step: int, wait_for_all: bool = False) -> Decision:
        """Count a step, `step` of the run, and return the decision of all ranks after it; all ranks
        call it.

        With `wait_for_all` the decision is that of `decide_now`: before the last step of an epoch,
        where a stop would have to wait for what the script does at the epoch's end. Else it is that
        of the last exchange, if one is due, and the schedule's for this step. Raise RuntimeError if
        a peer is gone.
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
        """Return the decision of all ranks by all that any of them knows, after an exchange that
        takes some 0.2 ms. All ranks call it; raise RuntimeError if a peer is gone."""
        first = self._exchange()
        return first.joined(self._take_decision())

    def restart_step(self) -> None:
        """Start the clock of a step, after something that is no part of it, such as a save."""
        self._stepped_at = time.monotonic()

    def end_pause(self) -> None:
        """Start the clock of a step; what came before was a pause, of which another may come."""
        self._times.add_pause(time.monotonic() - self._stepped_at)
        self.restart_step()

    def _exchange(self) -> Decision:
        """Return the decision of the last exchange, as `_take_decision` does, and begin the next
        with this rank's values; it is a collective."""
        self._wait_for_device()
        decision = self._take_decision()
        self.exchanges += 1
        # A save that has just been decided is not due once more.
        save = self._schedule.is_due() and not decision.save
        mean_s = sum(self._since_exchange) / max(len(self._since_exchange), 1)
        gather = self._timer is not None and self._timer.is_due()
        word = [self._reason(), int(save), int(gather), int(mean_s * 1e6)]
        values = torch.tensor(word, dtype=torch.int64, device="cpu")
        self._pending = (values, self._control.start_max(values))
        self._since_exchange.clear()
        return decision

    def _wait_for_device(self) -> None:
        """Wait for what the device had been given by the last exchange, about 0.2 s ago; it has at
        least a step of work left then. A device that the process has not opened, as beside a
        library's training on the CPU, stays closed."""
        if devices.is_used(self._device):
            if self._queued is not None and not self._queued.query():
                self._queued.synchronize()
            self._queued = devices.mark(self._device)

    def _take_decision(self) -> Decision:
        """Wait for the last exchange, and return its decision; an empty one where its decision has
        been returned before, or there was no exchange. Set the period to the next exchange.

        The timer reports figures here, and gathers them if the decision asks for it: at the same
        step on all ranks, so it is a collective. Raise RuntimeError if a peer is gone.
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

    def _reason(self) -> int:
        """Return this rank's reason to stop, `DEADLINE` where a later stop would come too late, or
        `NONE`."""
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
