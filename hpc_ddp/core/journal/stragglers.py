"""Which rank the others wait for, from the `ranks` events of a journal.

All ranks of a job end their steps together, whoever is slow. So each rank measures its own work:
a step less what it has waited for others in it. Rank 0 writes that down by rank, rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_ddp.core.console.units import brief_duration
from hpc_ddp.core.journal.journal import Event

IN_A_ROW = 3  # events; a minute and a half at the least
FACTOR = 1.25  # of what the others need
LEAST_SHARE = 0.1  # of a step's time that all wait: less than that is not worth a word


@dataclass(frozen=True)
class Slow:
    """A rank that the others have waited for, for long. `own_s` are its own seconds per step,
    `others_s` the median of all ranks; `data` tells that it is its loader that takes the time."""

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


def slow_rank(events: Sequence[Event]) -> Slow | None:
    """Return the slowest of the ranks that were much slower than the others lately, if any was.

    `events` is a journal, by attempt and time; what counts is the end of its newest start.
    """
    begun = max((i for i, e in enumerate(events) if e["event"] in ("started", "worker")), default=0)
    last = [event for event in events[begun:] if event["event"] == "ranks"][-IN_A_ROW:]
    if len(last) < IN_A_ROW:
        return None
    slow_ranks = [_slow_in(event) for event in last]
    always = set(slow_ranks[0]).intersection(*slow_ranks)
    for event, slow in zip(reversed(last), reversed(slow_ranks), strict=True):
        rank = event.get("slowest")
        if isinstance(rank, int) and rank in always:
            return slow[rank]
    return None


def _slow_in(event: Event) -> dict[int, Slow]:
    """Return the ranks that were slow, by rank; none where an event is not as we write it.

    By their own work, or else by their wait for data alone: behind a rank 0 that waits for data the
    others may wait for its buffers in what counts as their own work.
    """
    data, step_s = _numbers(event.get("data_s")), event.get("step_s")
    slow: dict[int, Slow] = {}
    if not isinstance(step_s, (int, float)):
        return slow
    for own_s in (_numbers(event.get("busy_s")), data):
        usual = _median(own_s) if own_s else 0.0
        for rank, seconds in enumerate(own_s):
            more = seconds - usual
            if seconds >= FACTOR * usual and more >= LEAST_SHARE * step_s and more > 0:
                waits = len(data) == len(own_s) and data[rank] - _median(data) >= more / 2
                node = event.get("node") if rank == event.get("slowest") else None
                slow[rank] = Slow(rank, node, seconds, usual, waits)
        if slow:
            break
    return slow


def _median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]  # the lower one: of two ranks the quicker


def _numbers(value: Any) -> list[float]:
    good = isinstance(value, list) and all(isinstance(number, (int, float)) for number in value)
    return value if good else []
