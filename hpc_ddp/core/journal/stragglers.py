"""Finds the rank for which the others wait, from the `ranks` events of a journal.

All ranks of a job end their steps together, whichever rank is slow. So each rank measures its own
work: the time of a step without the wait for other ranks. Rank 0 writes these times rarely, and
those of the slowest ranks alone: the event of ten thousand ranks is as large as that of 32.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_ddp.core.console.units import brief_duration
from hpc_ddp.core.journal.events import JournalEvent, Started, StepTiming, WorkerStarted

IN_A_ROW = 3  # events; a minute and a half at the least
SLOW_FACTOR = 1.25  # of what the others need
LEAST_SHARE = 0.1  # of a step's time that all wait: less than that is not worth a word
MOST_RANKS = 32  # of an event
SIGNIFICANT_DIGITS = 4


@dataclass(frozen=True)
class Slow:
    """A rank for which the others have waited for long. `own_s` is the time per step, in seconds,
    of its own work, or of its wait for data where only this wait is slow; `others_s` is the median
    of all ranks. `data` is True if the rank's loader takes the time. `node` is None where it is not
    known."""

    rank: int
    node: str | None
    own_s: float
    others_s: float
    data: bool

    def __str__(self) -> str:
        """The rank in words: ``rank 3 on n2 is slow: 0.9 s a step of its own, others 0.3 s``."""
        where = f" on {self.node}" if self.node else ""
        problem = "waits for data" if self.data else "is slow"
        seconds, usual = brief_duration(self.own_s), brief_duration(self.others_s)
        return f"rank {self.rank}{where} {problem}: {seconds} a step of its own, others {usual}"


def summarize_times(
    step: int,
    steps: int,
    step_s: float,
    data_s: Sequence[float],
    busy_s: Sequence[float] | None,
    nodes: Sequence[str],
) -> StepTiming:
    """Return the `ranks` event of the last `steps` steps, up to `step`.

    `data_s` and `busy_s` are, by rank, the wait for data and the own work (None: not measured);
    `nodes` are the ranks' nodes. There is one rank or more. Times are mean seconds per step;
    `step_s` is rank 0's whole step. The event has the `MOST_RANKS` ranks that lie furthest above
    the median of all ranks, by either time.
    """
    excess = [_excess(seconds) for seconds in (data_s, busy_s) if seconds]
    largest = [max(of_rank) for of_rank in zip(*excess, strict=True)]  # by rank
    slowest = heapq.nlargest(MOST_RANKS, range(len(largest)), key=largest.__getitem__)
    ranks = sorted(slowest)
    return StepTiming(
        step,
        steps,
        _round(step_s),
        ranks,
        [_round(data_s[rank]) for rank in ranks],
        _quartiles(data_s),
        slowest[0],
        nodes[slowest[0]],
        [_round(busy_s[rank]) for rank in ranks] if busy_s else None,
        _quartiles(busy_s) if busy_s else None,
    )


def _excess(seconds: Sequence[float]) -> list[float]:
    """Return how many seconds longer than the median each rank takes."""
    usual = statistics.median_low(seconds)
    return [rank_s - usual for rank_s in seconds]


def _quartiles(seconds: Sequence[float]) -> list[float]:
    """Return the least, the lower quartile, the median, the upper quartile and the most of one or
    more times in seconds. Where a quartile lies between two ranks, it is the time of the quicker
    one."""
    ordered = sorted(seconds)
    return [_round(ordered[(len(ordered) - 1) * part // 4]) for part in range(5)]


def _round(seconds: float) -> float:
    """Return seconds with `SIGNIFICANT_DIGITS` significant digits; a negative number becomes 0."""
    return float(f"{max(seconds, 0.0):.{SIGNIFICANT_DIGITS}g}")


def slow_rank(events: Sequence[JournalEvent]) -> Slow | None:
    """Return a rank that has long been much slower than the others, with its times in the newest
    event in which it was the slowest of all; None where there is none.

    `events` is a journal, by attempt and time. Only the last `IN_A_ROW` `ranks` events since the
    newest start count: the rank is slow in all of them, and the slowest of all ranks in at least
    one. None where there are fewer events.
    """
    starts = [i for i, event in enumerate(events) if isinstance(event, (Started, WorkerStarted))]
    newest = events[max(starts, default=0) :]
    last = [event for event in newest if isinstance(event, StepTiming)][-IN_A_ROW:]
    if len(last) < IN_A_ROW:
        return None
    slow_ranks = [_slow_ranks_of(event) for event in last]
    always = set(slow_ranks[0]).intersection(*slow_ranks)
    for event, slow in zip(reversed(last), reversed(slow_ranks), strict=True):
        if event.slowest in always:
            return slow[event.slowest]
    return None


def _slow_ranks_of(event: StepTiming) -> dict[int, Slow]:
    """Return the ranks that were slow in one `ranks` event, by rank; {} where none was.

    These are the ranks that are slow by their own work. Only where there are none, the ranks that
    are slow by their wait for data are returned: while rank 0 waits for data, the others may wait
    for rank 0's buffers, and this wait counts as their own work.
    """
    data, usual_data = event.data_s, _median_of(event.data_quartiles_s)
    slow: dict[int, Slow] = {}
    for own_s, quartiles in (
        (event.busy_s, event.busy_quartiles_s),
        (data, event.data_quartiles_s),
    ):
        usual = _median_of(quartiles)
        for index, (rank, seconds) in enumerate(zip(event.ranks, own_s or (), strict=False)):
            excess = seconds - usual
            is_worth_a_word = excess >= LEAST_SHARE * event.step_s and excess > 0
            if seconds >= SLOW_FACTOR * usual and is_worth_a_word:
                # A damaged event may have fewer waits than ranks.
                waits = len(data) > index and data[index] - usual_data >= excess / 2
                node = event.node if rank == event.slowest else None
                slow[rank] = Slow(rank, node, seconds, usual, waits)
        if slow:
            break
    return slow


def _median_of(quartiles: Sequence[float] | None) -> float:
    """Return the median of an event's quartiles. Where the event has none, return inf, so that no
    rank counts as slow."""
    return quartiles[2] if quartiles and len(quartiles) == 5 else math.inf
