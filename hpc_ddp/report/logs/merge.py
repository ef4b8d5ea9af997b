"""The lines of all ranks in order of time, and equal lines of several ranks as one."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from hpc_ddp.core.file_io import MOST_TEXT_BYTES, open_data
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.core.journal.journal import events_of
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.logs.files import LogFile

LIST_EVERY = 10  # polls between two looks for new ranks
FOLD_S = 2.0  # equal lines of several ranks within this time are one: times are good to a second


class Line(NamedTuple):
    """A line of a rank's log; `time` in unix seconds."""

    time: float
    rank: int
    node: str
    text: bytes


@dataclass
class AttemptLogs:
    """The logs of one attempt, of a run or of a task of an array, by node and rank. With `tidy`,
    only the last state of a progress bar is a line."""

    run: RunFolder
    attempt: AttemptFolder
    tidy: bool
    logs: dict[tuple[str, int], LogFile] = field(default_factory=dict)
    begin_shown: bool = False
    end_shown: bool = False
    _updates: int = 0
    _offsets: dict[Path, int] = field(default_factory=dict)  # bytes read of each `printed`

    def update(self, is_last: bool) -> None:
        """Find new logs, and read the supervisors' new notes of their sizes.

        New logs are looked for while there are none, in every `LIST_EVERY`-th call, and if
        `is_last`. Raise OSError where the attempt's folder can't be listed.
        """
        if is_last or not self._updates % LIST_EVERY or not self.logs:
            for node in self.attempt.nodes():
                for path in node.path.glob("rank-*.log"):
                    rank = path.stem.removeprefix("rank-")
                    if rank.isdecimal():
                        log = LogFile(path, self.tidy)
                        self.logs.setdefault((node.path.name, int(rank)), log)
                for path in node.path.glob("printed*"):
                    self._offsets.setdefault(path, 0)
        self._updates += 1
        for path in self._offsets:
            self._read_notes(path)

    def _read_notes(self, path: Path) -> None:
        """Read the new lines of a supervisor's `printed` into the times and sizes of its logs.
        Damaged ones, and those of logs that `update` has not looked for yet, are left out."""
        with contextlib.suppress(OSError), open_data(path) as file:
            file.seek(self._offsets[path])
            for line in file.read(MOST_TEXT_BYTES).splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break  # half-written: the next update reads it
                self._offsets[path] += len(line)
                with contextlib.suppress(ValueError, IndexError, KeyError):
                    words = line.split()
                    seconds, size = float(words[0]), int(words[2])
                    log = self.logs[path.parent.name, int(words[1])]
                    log.times.append(seconds)
                    log.sizes.append(size)

    def events(self) -> list[JournalEvent]:
        """Return the attempt's events, without those of the ranks, which are many; raise OSError
        where a journal can't be read."""
        paths = sorted(self.run.journal_folder.glob("*.jsonl"))
        events = (e for p in paths if not p.name.startswith("rank-") for e in events_of(p))
        return [event for event in events if event.attempt == self.attempt.number]

    def new_lines(self, is_last: bool) -> Iterator[Line]:
        """Yield the new lines of all ranks in order of time, by what `update` has read last;
        `is_last`: also lines without an end. The next call begins behind them. Logs that can't be
        read have none."""
        # Every so often all logs are read: a supervisor may not be able to note their sizes.
        read_all = is_last or self._updates % LIST_EVERY == 1
        now = time.time()
        streams = [
            _stream(node, rank, log, is_last, now)
            for (node, rank), log in sorted(self.logs.items())
            if read_all or log.may_have_grown
        ]
        return heapq.merge(*streams, key=itemgetter(0, 1))


def _stream(node: str, rank: int, log: LogFile, is_last: bool, now: float) -> Iterator[Line]:
    """Yield a rank's new lines. Within a call their times do not go back, nor beyond `now` in unix
    seconds (a clock may be ahead)."""
    latest = 0.0
    for seconds, text in log.new_lines(is_last):
        latest = max(latest, min(seconds, now))
        yield Line(latest, rank, node, text)


class LineFolder:
    """Folds equal lines that several ranks print at about the same time into one; unless `fold`,
    shows each.

    No rank's lines change their order: those before an equal one are shown first. A line is taken
    in, and lines are forgotten, only as the caller iterates over the result.
    """

    def __init__(self, fold: bool) -> None:
        self._fold = fold
        self._held: list[Line] = []

    def add(self, line: Line) -> Iterator[tuple[Line, list[int]]]:
        """Add a line; yield those that are too old to be equal to it, and the lines behind them
        that are held, with their ranks. Unless lines are folded, yield this one alone."""
        if not self._fold:
            yield line, [line.rank]
            return
        yield from self.release(line.time - FOLD_S)
        self._held.append(line)

    def release(self, before: float) -> Iterator[tuple[Line, list[int]]]:
        """Yield all held lines with their ranks, and forget them, if the first is from before
        `before` (unix seconds); else none."""
        if not self._held or self._held[0].time >= before:
            return
        held, self._held = self._held, []
        queues: dict[int, deque[Line]] = {}
        counts: dict[bytes, Counter[int]] = {}  # of each text, how often each rank still has it
        for line in held:
            queues.setdefault(line.rank, deque()).append(line)
            counts.setdefault(line.text, Counter())[line.rank] += 1

        def pop(rank: int) -> Line:
            """Remove the first line of a rank from its queue and the counts, and return it."""
            line = queues[rank].popleft()
            counts[line.text][rank] -= 1
            return line

        shown_early: Counter[int] = Counter()  # lines of each rank that were shown with another's
        for line in held:
            if shown_early[line.rank]:
                shown_early[line.rank] -= 1
                continue
            pop(line.rank)
            ranks = [line.rank]
            equal = [rank for rank, count in counts[line.text].items() if count]
            for rank in equal:
                if rank == line.rank:
                    continue
                while True:
                    first = pop(rank)
                    shown_early[rank] += 1
                    if first.text == line.text:
                        break
                    yield first, [rank]
                ranks.append(rank)
            yield line, ranks


def spans(numbers: Iterable[int]) -> str:
    """Return numbers, sorted, as ``0-3,7``; '' without any."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
