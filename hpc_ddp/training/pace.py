"""When to save and when to stop: clocks and notices on one side, one decision on the other."""

from __future__ import annotations

import time

from hpc_ddp.training.control import Control
from hpc_ddp.training.exchange import Decision, Exchange
from hpc_ddp.training.notice import DEADLINE, NONE, Notices

MARGIN_S = 5.0  # to tear down, and for clocks that differ between hosts
FIRST_SAVE_S = 5.0  # a guess, until a save has been measured


class Pace:
    """Turns what each rank knows into decisions that all ranks share.

    `end_time` is in unix seconds; None means no limit. `save_every_s` counts on rank 0's
    clock, `save_every_steps` in steps; either may be None.
    """

    def __init__(
        self,
        control: Control,
        notices: Notices,
        end_time: float | None,
        save_every_s: float | None,
        save_every_steps: int | None,
    ) -> None:
        self._exchange = Exchange(control)
        self.exchanges = 0  # so far, the same number on all ranks
        self._keeps_time = control.rank == 0
        self._notices, self._end_time = notices, end_time
        self._save_every_s, self._save_every_steps = save_every_s, save_every_steps
        self._saved_at = self._stepped_at = time.monotonic()
        self._steps: list[float] = []  # the durations since the last exchange, in seconds
        self._slowest_before_s = 0.0
        self._save_s = FIRST_SAVE_S

    def step_done(self, step: int) -> Decision:
        """Count a step, and return what all ranks do after it."""
        now = time.monotonic()
        self._steps.append(now - self._stepped_at)
        self._stepped_at = now
        decision = self._turn() if self._exchange.due() else Decision()
        if self._save_every_steps and step % self._save_every_steps == 0:
            return Decision(decision.reason, save=True)
        return decision

    def epoch_done(self) -> Decision:
        """Return what all ranks do between two epochs; here they wait for each other."""
        first = self._turn()
        second = self._exchange.read()
        return Decision(max(first.reason, second.reason), first.save or second.save)

    def restart_step(self) -> None:
        """Start the clock of a step: what came before (an evaluation, a save) is not part of it."""
        self._stepped_at = time.monotonic()

    def saved(self, slowest_s: float) -> None:
        """Start the clock of the next save; `slowest_s` is the longest save so far."""
        self._saved_at = time.monotonic()
        self._save_s = slowest_s or self._save_s
        self.restart_step()

    def _turn(self) -> Decision:
        """Read the last exchange and send the next."""
        decision = self._exchange.read()
        self.exchanges += 1
        # A save that has just been decided is not due once more.
        save = self._save_due() and not decision.save
        mean_s = sum(self._steps) / max(len(self._steps), 1)
        self._exchange.send(self._reason(), save, mean_s)
        self._slowest_before_s = max(self._steps, default=0.0)
        self._steps.clear()
        return decision

    def _save_due(self) -> bool:
        if self._save_every_s is None or not self._keeps_time:
            return False
        return time.monotonic() - self._saved_at >= self._save_every_s

    def _reason(self) -> int:
        if self._notices.reason == NONE and self._end_time is not None:
            # Two exchanges pass, at most, between this word and the stop.
            step_s = max(self._steps, default=self._slowest_before_s)
            steps = 2 * self._exchange.period + 1
            need_s = MARGIN_S + 1.5 * self._save_s + steps * step_s
            if time.time() + need_s >= self._end_time:
                return DEADLINE
        return self._notices.reason
