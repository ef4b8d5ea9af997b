"""When to save and when to stop: clocks and notices on one side, one decision on the other."""

from __future__ import annotations

import time
from collections import deque
from itertools import islice

from hpc_ddp.training.process.process_group import Control
from hpc_ddp.training.stops.exchange import LEAST_STEP_US, PERIOD_US, Decision, Exchange
from hpc_ddp.training.stops.schedule import Schedule
from hpc_ddp.training.stops.signals import DEADLINE, NONE, Notices
from hpc_ddp.training.telemetry.step_timing import StepTimer

MARGIN_S = 5.0  # to tear down, and for clocks that differ between hosts
PAUSE_SHARE = 0.05  # of the attempt's time: the most that is kept free for one more pause,
SAVE_SHARE = 0.25  # and for a save: one that met a disk in trouble says little of the next
MOST_STEPS = 2 * (PERIOD_US // LEAST_STEP_US) + 1  # until a stop that is decided now


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
        others = len(recent) - 1
        step_s = (sum(recent) - slowest_s) / others if others > 0 else slowest_s
        return (steps - 1) * step_s + max(step_s, min(self.longest_pause_s, longest_pause_s))


class Pace:
    """Turns what each rank knows into decisions that all ranks share.

    `notices` has the end time, in unix seconds, on the ranks that are to watch it: None means no
    limit, or not this rank.
    """

    def __init__(
        self,
        control: Control,
        notices: Notices,
        schedule: Schedule,
        timer: StepTimer | None = None,
    ) -> None:
        self._exchange, self._timer = Exchange(control), timer
        self._notices, self._schedule = notices, schedule
        self._stepped_at, self._started_at = time.monotonic(), time.time()
        self.exchanges = 0  # so far, the same number on all ranks
        self._since_exchange: list[float] = []  # the durations of steps, in seconds
        self._times = StepTimes()

    def step_done(self, step: int, hear_all: bool = False) -> Decision:
        """Count a step, and return what all ranks do after it.

        `hear_all` waits for all that any rank knows by now: before the last step of an epoch,
        where a stop would have to wait for what the script does at the epoch's end.
        """
        now = time.monotonic()
        self._since_exchange.append(now - self._stepped_at)
        self._times.add(now - self._stepped_at)
        self._stepped_at = now
        due = self._exchange.due()
        decision = self.hear_all() if hear_all else self._turn() if due else Decision()
        if self._schedule.after_step(step):
            return Decision(decision.reason, save=True)
        return decision

    def _read(self) -> Decision:
        """Return what was sent last; here, at the same step on all ranks, they gather figures."""
        decision = self._exchange.read()
        if self._timer:
            self._timer.report()
            if decision.gather:
                self._timer.gather()
        return decision

    def hear_all(self) -> Decision:
        """Return what all ranks do now; here they wait for each other, some 0.2 ms."""
        first = self._turn()
        second = self._read()
        return Decision(max(first.reason, second.reason), first.save or second.save)

    def restart_step(self) -> None:
        """Start the clock of a step: what came before (a save, the last epoch's end) is no part of
        it."""
        self._stepped_at = time.monotonic()

    def end_pause(self) -> None:
        """Start the clock of a step; what came before was a pause, of which another may come."""
        self._times.add_pause(time.monotonic() - self._stepped_at)
        self.restart_step()

    def _turn(self) -> Decision:
        """Read the last exchange and send the next."""
        decision = self._read()
        self.exchanges += 1
        # A save that has just been decided is not due once more.
        save = self._schedule.due() and not decision.save
        mean_s = sum(self._since_exchange) / max(len(self._since_exchange), 1)
        gather = self._timer is not None and self._timer.is_due()
        self._exchange.send(self._reason(), save, gather, mean_s)
        self._since_exchange.clear()
        return decision

    def _reason(self) -> int:
        end_time = self._notices.end_time
        if self._notices.reason == NONE and end_time is not None:
            # Two exchanges pass, at most, between this word and the stop.
            steps = 2 * self._exchange.period + 1
            whole_s = end_time - self._started_at
            save_s = min(1.5 * self._schedule.save_s(), SAVE_SHARE * whole_s)
            steps_s = self._times.expect(steps, PAUSE_SHARE * whole_s)
            if time.time() + MARGIN_S + save_s + steps_s >= end_time:
                return DEADLINE
        return self._notices.reason
