"""When to save and when to stop: clocks and notices on one side, one decision on the other."""

from __future__ import annotations

import time

from hpc_ddp.training.control import Control
from hpc_ddp.training.effort import Effort
from hpc_ddp.training.exchange import Decision, Exchange
from hpc_ddp.training.notice import DEADLINE, NONE, Notices
from hpc_ddp.training.schedule import Schedule

MARGIN_S = 5.0  # to tear down, and for clocks that differ between hosts


class Pace:
    """Turns what each rank knows into decisions that all ranks share.

    `end_time` is in unix seconds; None means no limit.
    """

    def __init__(
        self,
        control: Control,
        notices: Notices,
        end_time: float | None,
        schedule: Schedule,
        effort: Effort | None = None,
    ) -> None:
        self._exchange, self._effort = Exchange(control), effort
        self._notices, self._end_time, self._schedule = notices, end_time, schedule
        self._stepped_at = time.monotonic()
        self.exchanges = 0  # so far, the same number on all ranks
        self._steps: list[float] = []  # the durations since the last exchange, in seconds
        self._slowest_before_s = 0.0

    def step_done(self, step: int, hear_all: bool = False) -> Decision:
        """Count a step, and return what all ranks do after it.

        `hear_all` waits for all that any rank knows by now: before the last step of an epoch,
        where a stop would have to wait for what the script does at the epoch's end.
        """
        now = time.monotonic()
        self._steps.append(now - self._stepped_at)
        self._stepped_at = now
        due = self._exchange.due()
        decision = self.hear_all() if hear_all else self._turn() if due else Decision()
        if self._schedule.after_step(step):
            return Decision(decision.reason, save=True)
        return decision

    def _read(self) -> Decision:
        """Return what was sent last; here, at the same step on all ranks, they gather figures."""
        decision = self._exchange.read()
        if self._effort:
            self._effort.tell()
            if decision.gather:
                self._effort.gather()
        return decision

    def hear_all(self) -> Decision:
        """Return what all ranks do now; here they wait for each other, some 0.2 ms."""
        first = self._turn()
        second = self._read()
        return Decision(max(first.reason, second.reason), first.save or second.save)

    def restart_step(self) -> None:
        """Start the clock of a step: what came before (an evaluation, a save) is not part of it."""
        self._stepped_at = time.monotonic()

    def _turn(self) -> Decision:
        """Read the last exchange and send the next."""
        decision = self._read()
        self.exchanges += 1
        # A save that has just been decided is not due once more.
        save = self._schedule.due() and not decision.save
        mean_s = sum(self._steps) / max(len(self._steps), 1)
        gather = self._effort is not None and self._effort.due()
        self._exchange.send(self._reason(), save, gather, mean_s)
        self._slowest_before_s = max(self._steps, default=0.0)
        self._steps.clear()
        return decision

    def _reason(self) -> int:
        if self._notices.reason == NONE and self._end_time is not None:
            # Two exchanges pass, at most, between this word and the stop.
            step_s = max(self._steps, default=self._slowest_before_s)
            steps = 2 * self._exchange.period + 1
            need_s = MARGIN_S + 1.5 * self._schedule.save_s() + steps * step_s
            if time.time() + need_s >= self._end_time:
                return DEADLINE
        return self._notices.reason
