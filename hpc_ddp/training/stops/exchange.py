"""How all ranks come to stop, or to save, at the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hpc_ddp.training.process.process_group import Control
from hpc_ddp.training.stops.signals import NONE

PERIOD_US = 200_000  # an exchange costs up to 0.5 ms: well under 1 % at one per 0.2 s
LEAST_STEP_US = 500  # so that never more than 400 steps pass, should they turn slow


@dataclass(frozen=True)
class Decision:
    """What all ranks read from the same exchange. `reason` is `NONE` unless they must stop."""

    reason: int = NONE
    save: bool = False
    gather: bool = False  # what the ranks have measured of themselves


def next_period(current: int, step_us: int) -> int:
    """Return the number of steps until the next exchange: about 0.2 s of `step_us` each.

    It at most doubles, so that some quick steps in a row do not make the ranks deaf for long
    should the following ones be slow.
    """
    return max(1, min(2 * current, PERIOD_US // max(step_us, LEAST_STEP_US)))


class Exchange:
    """A few integers that travel by a MAX all-reduce while steps compute.

    What is sent at one exchange is read at the next, so that no step waits for it; both
    happen at the same steps on all ranks, since the period comes from reduced values only.
    """

    def __init__(self, control: Control) -> None:
        self.period = 1
        self._since = 0
        self._control = control
        self._pending: tuple[torch.Tensor, Any] | None = None

    def due(self) -> bool:
        """Count a step; tell whether an exchange belongs to it."""
        self._since += 1
        return self._since >= self.period

    def read(self) -> Decision:
        """Return what was sent at the last exchange, by whichever rank."""
        self._since = 0
        if self._pending is None:
            return Decision()
        values, work = self._pending
        self._pending = None
        work.wait()
        reason, save, gather, step_us = values.tolist()
        self.period = next_period(self.period, step_us)
        return Decision(reason, bool(save), bool(gather))

    def send(self, reason: int, save: bool, gather: bool, step_s: float) -> None:
        """Send this rank's word, and how long its steps take on average, in seconds."""
        word = [reason, int(save), int(gather), int(step_s * 1e6)]
        values = torch.tensor(word, device="cpu")
        self._pending = (values, self._control.start_max(values))
