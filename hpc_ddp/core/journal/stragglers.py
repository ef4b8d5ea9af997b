"""Which rank the others wait for, from the `ranks` events of a journal.

All ranks of a job end their steps together, whichever rank is slow. So each rank measures its own
work: a step less what it has waited for others in it. Rank 0 writes that down by rank, rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_ddp.core.console.units import brief_duration
from hpc_ddp.core.journal.events import JournalEvent, Started, StepTiming, WorkerStarted

IN_A_ROW = 3  # events; a minute and a half at the least
FACTOR = 1.25  # of what the others need
LEAST_SHARE = 0.1  # of a step's time that all wait: less than that is not worth a word


@dataclass(frozen=True)
class Slow:
    """A rank that the others have waited for, for long. `own_s` are its own seconds per step,
    `others_s` the median of all ranks; with `data` its loader takes the time."""

    rank: int
    node: str | None
    own_s: float
    others_s: float
    data: bool

    def __str__(self) -> str:
        """The slow rank as a part of a sentence: ``rank 3 on n2 is slow: 0.9 s per step …``."""
        where = f" on {self.node}" if self.node else ""
        problem = "waits for data" if self.data else "is slow"
        seconds, usual = brief_duration(self.own_s), brief_duration(self.others_s)
        return f"rank {self.rank}{where} {problem}: {seconds} a step of its own, others {usual}"


def slow_rank(events: Sequence[JournalEvent]) -> Slow | None:
    """Return the slowest of the ranks that were much slower than the others lately; None without
    one.

    `events` is a journal, by attempt and time. Only the last `IN_A_ROW` `ranks` events of its
    newest start count: the rank is slow in all of them, and the slowest in one. None where there
    are fewer.
    """
    starts = [i for i, event in enumerate(events) if isinstance(event, (Started, WorkerStarted))]
    newest = events[max(starts, default=0) :]
    last = [event for event in newest if isinstance(event, StepTiming)][-IN_A_ROW:]
    if len(last) < IN_A_ROW:
        return None
    slow_ranks = [_slow_in(event) for event in last]
    always = set(slow_ranks[0]).intersection(*slow_ranks)
    for event, slow in zip(reversed(last), reversed(slow_ranks), strict=True):
        if event.slowest in always:
            return slow[event.slowest]
    return None


def _slow_in(event: StepTiming) -> dict[int, Slow]:
    """Return the ranks that were slow in one `ranks` event, by rank; {} without one.

    By their own work, or else by their wait for data alone: behind a rank 0 that waits for data the
    others may wait for its buffers in what counts as their own work.
    """
    data = event.data_s
    slow: dict[int, Slow] = {}
    for own_s in (event.busy_s or (), data):
        usual = _median(own_s) if own_s else 0.0
        for rank, seconds in enumerate(own_s):
            more = seconds - usual
            if seconds >= FACTOR * usual and more >= LEAST_SHARE * event.step_s and more > 0:
                waits = len(data) == len(own_s) and data[rank] - _median(data) >= more / 2
                node = event.node if rank == event.slowest else None
                slow[rank] = Slow(rank, node, seconds, usual, waits)
        if slow:
            break
    return slow


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]  # the lower one: of two ranks the quicker
