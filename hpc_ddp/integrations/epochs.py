"""`EpochStop`: a `StopPoint` for a loop over epochs and their batches."""

from __future__ import annotations

from typing import Any

from hpc_ddp.integrations.stop_point import StopPoint


class EpochStop(StopPoint):
    """Knows how much of which epoch is done, in ``facts["epoch"]`` and ``facts["batches"]``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.facts = {"epoch": 0, "batches": 0}
        self._has_warned = False

    def _begin_epoch(self, epoch: int) -> int | None:
        """Begin an epoch, or what is left of it; return how many of its batches are done, None for
        an epoch that is over, with a warning: the loop does what stands behind its batches again,
        as the steps of a scheduler."""
        if epoch < self.facts["epoch"]:
            if not self._has_warned:
                self._has_warned = True
                self._say(
                    f"WARNING: epoch {epoch} is done, and what the loop does behind its batches is"
                    " done again; begin with: for epoch in range(stop.position.epoch, …)"
                )
            return None
        done: int = self.facts["batches"] if epoch == self.facts["epoch"] else 0
        self.facts = {"epoch": epoch, "batches": done}
        return done

    def _end_epoch(self) -> None:
        """Note that all batches of the epoch are done."""
        self.facts = {"epoch": self.facts["epoch"] + 1, "batches": 0}
