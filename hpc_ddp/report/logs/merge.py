"""The lines of all ranks in order of time, and equal lines of several ranks as one."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import re
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from hpc_ddp.core.file_io import MOST_TEXT_BYTES, open_data, read_small_below
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.core.journal.journal import events_of
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.logs.files import Block, Cut, LogFile, chunk_for

LIST_EVERY = 10  # polls between two looks for new ranks
FOLD_S = 2.0  # equal lines of several ranks within this time are one: times are good to a second


class Line(NamedTuple):
    """A line of a rank's log, or several that were printed together; `time` in unix seconds. With
    `is_alone` no other rank has printed anything within seconds."""

    time: float
    rank: int
    node: str
    text: bytes
    is_alone: bool = False


LogKey = tuple[str, int]  # a node and a rank


@dataclass
class AttemptLogs:
    """The logs of one attempt, of a run or of a task of an array, by node and rank. With `tidy`,
    only the last state of a progress bar is a line."""

    run: RunFolder
    attempt: AttemptFolder
    tidy: bool
    logs: dict[LogKey, LogFile] = field(default_factory=dict)
    begin_shown: bool = False  # set by the caller, once it has printed the attempt's beginning
    end_shown: bool = False
    _updates: int = 0
    _offsets: dict[Path, int] = field(default_factory=dict)  # bytes read of each `printed`

    def update(self, is_last: bool) -> None:
        """Find new logs, and read the supervisors' new notes of their sizes.

        New logs are looked for while there are none, in every `LIST_EVERY`-th call, and if
        `is_last`. Notes that can't be read are left out. Raise OSError where the attempt's folder
        can't be listed.
        """
        if is_last or not self._updates % LIST_EVERY or not self.logs:
            self._find_logs()
        self._updates += 1
        for path in self._offsets:
            with contextlib.suppress(OSError), open_data(path) as file:
                file.seek(self._offsets[path])
                self._add_notes(path, file.read(MOST_TEXT_BYTES))

    def _find_logs(self) -> None:
        """Add the logs that have come since, and the supervisors' files of notes, which are read
        on the way where they are small. Raise OSError where the attempt's folder can't be
        listed."""
        for node, entries, files in read_small_below(self.attempt.path, _has_notes):
            folder = self.attempt.node(node).path
            for name in filter(_is_log, entries):
                key = node, _rank_of(name)
                if key not in self.logs:
                    self.logs[key] = LogFile(folder / name, self.tidy)
            for name, small in files.items():
                path = folder / name
                if path not in self._offsets:
                    self._offsets[path] = 0
                    self._add_notes(path, small.content if small else b"")

    def _add_notes(self, path: Path, text: bytes) -> None:
        """Add new lines of a supervisor's file `printed`, whose new content is `text`, to the times
        and sizes of its logs, and count them as read. Damaged lines, and those of logs that
        `update` has not found yet, are left out."""
        text = text[: text.rfind(b"\n") + 1]  # a half-written line is read by the next update
        self._offsets[path] += len(text)
        try:
            notes = _notes_in(text.split())
        except ValueError:
            notes = _notes_in([word for note in _NOTE.findall(text) for word in note])
        node, rank, log = path.parent.name, b"", None
        for seconds, of_rank, size in notes:
            if of_rank != rank:  # a rank that prints each second has half a million
                rank, log = of_rank, self.logs.get((node, int(of_rank)))
            if log:
                log.times.append(seconds)
                log.sizes.append(size)

    def events(self) -> list[JournalEvent]:
        """Return the attempt's events of the batch script, its beginning and its end; [] without
        any. The events of other writers are not read, since they are in thousands of files. Raise
        OSError where the file can't be read."""
        events: list[JournalEvent] = []
        with contextlib.suppress(FileNotFoundError):
            events = list(events_of(self.run.journal("batch").path))
        return [event for event in events if event.attempt == self.attempt.number]

    def new_lines(self, is_last: bool) -> Iterator[Line]:
        """Yield the new lines of all ranks in order of time, by the notes that `update` has read
        last; the next call begins behind them. A line without its line break is yielded only if
        `is_last`. Logs that can't be read have no lines. Raise OSError if `is_last` and the
        attempt's folder can't be listed."""
        # Every so often all logs are read: a supervisor may not be able to note their sizes.
        read_all = is_last or self._updates % LIST_EVERY == 1
        logs = {key: log for key, log in self.logs.items() if read_all or log.may_have_grown}
        # While it grows, any line may have an equal one that is noted a moment later.
        contents = self._read_small(logs) if is_last else {}
        busy = _busy_seconds(logs) if is_last else None
        now, chunk = time.time(), chunk_for(len(logs) - len(contents))
        short: list[Line] = []
        streams: list[Iterator[Line]] = []
        for key, log in sorted(logs.items()):
            content = contents.get(key)
            blocks = log.new_blocks(is_last, _cuts(log, busy), content, chunk)
            stream = _stream(*key, blocks, now)
            if content is None:
                streams.append(stream)
            else:
                short += stream
        short.sort(key=itemgetter(0, 1))
        return heapq.merge(short, *streams, key=itemgetter(0, 1))

    def _read_small(self, logs: Container[LogKey]) -> dict[LogKey, bytes]:
        """Return the contents of those of `logs` that are small, by node and rank, which asks the
        disk less often than one by one. Raise OSError where the attempt's folder can't be
        listed."""
        contents: dict[LogKey, bytes] = {}
        for node, _, files in read_small_below(self.attempt.path, _is_log):
            of_rank = {(node, _rank_of(name)): small for name, small in files.items() if small}
            contents |= {key: small.content for key, small in of_rank.items() if key in logs}
        return contents


_NOTE = re.compile(rb"^(\d+\.?\d*) (\d+) (\d+)$", re.M)


def _notes_in(words: Sequence[bytes]) -> list[tuple[float, bytes, int]]:
    """Return a supervisor's notes: unix seconds, rank, and size of the rank's log in bytes. Raise
    ValueError for words that are no notes."""
    seconds, sizes = map(float, words[::3]), map(int, words[2::3])
    return list(zip(seconds, words[1::3], sizes, strict=True))


def _is_log(name: str) -> bool:
    return name.startswith("rank-") and name.endswith(".log") and name[5:-4].isdecimal()


def _rank_of(name: str) -> int:
    """Return the rank of a name for which `_is_log` is true."""
    return int(name[5:-4])


def _has_notes(name: str) -> bool:
    return name.startswith("printed")


def _busy_seconds(logs: Mapping[LogKey, LogFile]) -> set[int]:
    """Return the whole unix seconds in which equal lines of several ranks may have come.

    A noted second is critical if several logs have grown in it, or if the noted second before or
    after it is another log's. Busy are all seconds at most `FOLD_S` + 1 from a critical one.
    """
    owners: dict[int, LogKey | None] = {}  # None: several
    for key, log in logs.items():
        for second in map(int, log.times):
            if owners.setdefault(second, key) is not key:
                owners[second] = None
    seconds = sorted(owners)
    changes = {second for second in seconds if owners[second] is None}
    for before, after in itertools.pairwise(seconds):
        if owners[before] != owners[after]:
            changes |= {before, after}
    around = range(-int(FOLD_S) - 1, int(FOLD_S) + 2)
    return {second + more for second in changes for more in around}


def _cuts(log: LogFile, busy: Container[int] | None) -> list[Cut]:
    """Return where to cut the new part of a log so that its lines can be put in order with the
    lines of other logs. There is a cut at each note of a `busy` second (None: all are busy), and,
    with `is_alone`, at the last one of neighbouring notes that are not busy."""
    first = bisect_right(log.sizes, log.position)
    if busy is None:
        return [Cut(size, False) for size in log.sizes[first:]]
    cuts: list[Cut] = []
    alone: int | None = None  # the size at the last note of a row that is not busy
    for seconds, size in zip(log.times[first:], log.sizes[first:], strict=True):
        if int(seconds) not in busy:
            alone = size
            continue
        if alone is not None:
            cuts.append(Cut(alone, True))
            alone = None
        cuts.append(Cut(size, False))
    return cuts if alone is None else [*cuts, Cut(alone, True)]


def _stream(node: str, rank: int, blocks: Iterable[Block], now: float) -> Iterator[Line]:
    """Yield a rank's blocks as lines. Their times do not go back within a call, nor beyond `now`,
    in unix seconds (a clock may be ahead)."""
    latest = 0.0
    for seconds, text, is_alone in blocks:
        latest = max(latest, min(seconds, now))
        yield Line(latest, rank, node, text, is_alone)


class LineFold:
    """Folds equal lines that several ranks print at about the same time into one; with
    `folds` False each line is passed on.

    No rank's lines change their order: those before an equal one are yielded first. The methods
    work only as the caller iterates over their result.
    """

    def __init__(self, folds: bool) -> None:
        self._folds = folds
        self._held: list[Line] = []

    def add(self, line: Line) -> Iterator[tuple[Line, list[int]]]:
        """Add a `Line`, to be held until lines that may be equal to it have come. Yield the lines
        that were held, with the ranks that printed them, if the first of them is too old to be
        equal to this one (`FOLD_S`).

        A line that no other rank can have printed is yielded at once, behind all held ones; where
        lines are not folded, each line is.
        """
        if not self._folds:
            yield line, [line.rank]
        elif line.is_alone:
            yield from self.release(math.inf)
            yield line, [line.rank]
        else:
            yield from self.release(line.time - FOLD_S)
            self._held.append(line)

    def release(self, before: float) -> Iterator[tuple[Line, list[int]]]:
        """Yield all held lines with their ranks, and forget them, if the first is from before
        `before` (unix seconds); else none."""
        if not self._held or self._held[0].time >= before:
            return
        held, self._held = self._held, []
        texts: dict[int, list[bytes]] = {}
        for line in held:
            texts.setdefault(line.rank, []).append(line.text)
        alike: dict[bytes, list[int]] = {}  # most of thousands of ranks print the same
        for rank, parts in texts.items():
            alike.setdefault(b"".join(parts), []).append(rank)
        ranks_like = {ranks[0]: ranks for ranks in alike.values()}
        lines = [
            line._replace(text=text)
            for line in held
            if line.rank in ranks_like
            for text in line.text.splitlines(keepends=True)
        ]
        for line, ranks in _fold_lines(lines):
            yield line, list(itertools.chain.from_iterable(ranks_like[rank] for rank in ranks))


def _fold_lines(held: Sequence[Line]) -> Iterator[tuple[Line, list[int]]]:
    """Yield each of the `held` lines, which are in order of time, with the ranks that printed an
    equal one; equal lines once. The order is that of time, except that the lines which another rank
    printed before an equal one come before it."""
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
    """Return numbers, no two equal, in rising order as ``0-3,7``; '' without any."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
