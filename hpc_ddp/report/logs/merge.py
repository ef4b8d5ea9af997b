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
from hpc_ddp.report.logs.files import Block, Cut, LogFile, chunk_bytes

LIST_EVERY = 10  # new ranks are looked for at every tenth poll
FOLD_S = 2.0  # equal lines of several ranks within this time are one: times are exact to a second


class Line(NamedTuple):
    """A line of a rank's log, or several lines that were printed together; `time` in unix seconds.
    With `is_alone` no other rank has printed anything within seconds of it."""

    time: float
    rank: int
    node: str
    text: bytes
    is_alone: bool = False


LogKey = tuple[str, int]  # a node and a rank


@dataclass
class AttemptLogs:
    """The logs of one attempt of `run` (a run, or a task of an array), by node and rank. With
    `tidy` a progress bar counts as one line, with its last state."""

    run: RunFolder
    attempt: AttemptFolder
    tidy: bool
    logs: dict[LogKey, LogFile] = field(default_factory=dict)
    begin_shown: bool = False  # set by the caller, once it has printed the attempt's beginning
    end_shown: bool = False  # … its end
    _updates: int = 0  # the number of calls of `update`
    _offsets: dict[Path, int] = field(default_factory=dict)  # bytes read of each file `printed`

    def update(self, is_last: bool) -> None:
        """Find new logs, and read the supervisors' new notes of the logs' sizes.

        New logs are looked for while none is known, in every `LIST_EVERY`-th call, and if
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
        """Add the logs that are new in the attempt's folder, and the supervisors' new files of
        notes, of which small ones are read at once. Raise OSError where the folder can't be
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
        """Add the notes in `text`, the new content of a supervisor's file ``printed``, to the times
        and sizes of the logs, and count them as read. Damaged notes, and notes of logs that
        `update` has not found yet, are left out."""
        text = text[: text.rfind(b"\n") + 1]  # a half-written line is read by the next update
        self._offsets[path] += len(text)
        try:
            notes = _parse_notes(text.split())
        except ValueError:  # a line is damaged: the slower search leaves it out
            notes = _parse_notes([word for note in _NOTE.findall(text) for word in note])
        node, rank, log = path.parent.name, b"", None
        for seconds, note_rank, size in notes:
            if note_rank != rank:  # else the same log: there may be half a million notes of a rank
                rank, log = note_rank, self.logs.get((node, int(note_rank)))
            if log:
                log.times.append(seconds)
                log.sizes.append(size)

    def read_events(self) -> list[JournalEvent]:
        """Return the attempt's events by the batch script, as its beginning and its end; [] without
        any. Events of other writers, which are in thousands of files, are not read. Raise OSError
        where the batch script's file can't be read."""
        events: list[JournalEvent] = []
        with contextlib.suppress(FileNotFoundError):
            events = list(events_of(self.run.journal("batch").path))
        return [event for event in events if event.attempt == self.attempt.number]

    def read_new_lines(self, is_last: bool) -> Iterator[Line]:
        """Return the new lines of all ranks in order of time (then of rank), by the notes that
        `update` has read last; logs are read while the caller iterates. The next call begins behind
        these lines. A line without its line break is among them only if `is_last`. Logs that can't
        be read have no lines. Raise OSError if `is_last` and the attempt's folder can't be
        listed."""
        # Every so often all logs are read: a supervisor may not be able to note their sizes.
        read_all = is_last or self._updates % LIST_EVERY == 1
        logs = {key: log for key, log in self.logs.items() if read_all or log.may_have_grown}
        # Before the end, any line may have an equal one that is noted a moment later: all are busy.
        contents = self._read_small_logs(logs) if is_last else {}
        busy = _busy_seconds(logs) if is_last else None
        now, size = time.time(), chunk_bytes(len(logs) - len(contents))
        small_lines: list[Line] = []
        streams: list[Iterator[Line]] = []
        for key, log in sorted(logs.items()):
            content = contents.get(key)
            blocks = log.read_new_blocks(is_last, _cuts(log, busy), content, size)
            lines = _lines_of_rank(*key, blocks, now)
            if content is None:
                streams.append(lines)
            else:
                small_lines += lines
        small_lines.sort(key=itemgetter(0, 1))  # time and rank
        return heapq.merge(small_lines, *streams, key=itemgetter(0, 1))

    def _read_small_logs(self, logs: Container[LogKey]) -> dict[LogKey, bytes]:
        """Return the contents of those of `logs` that are small, by node and rank. Together they
        take fewer requests to the disk than one by one. Raise OSError where the attempt's folder
        can't be listed."""
        contents: dict[LogKey, bytes] = {}
        for node, _, files in read_small_below(self.attempt.path, _is_log):
            small_files = {(node, _rank_of(name)): small for name, small in files.items() if small}
            contents |= {key: small.content for key, small in small_files.items() if key in logs}
        return contents


_NOTE = re.compile(rb"^(\d+\.?\d*) (\d+) (\d+)$", re.M)


def _parse_notes(words: Sequence[bytes]) -> list[tuple[float, bytes, int]]:
    """Return a supervisor's notes, three `words` each: unix seconds, rank, and size of the rank's
    log in bytes. Raise ValueError for words that are no notes."""
    seconds, sizes = map(float, words[::3]), map(int, words[2::3])
    return list(zip(seconds, words[1::3], sizes, strict=True))


def _is_log(name: str) -> bool:
    """Return whether a file of a node is a rank's log, ``rank-R.log``."""
    return name.startswith("rank-") and name.endswith(".log") and name[5:-4].isdecimal()


def _rank_of(name: str) -> int:
    """Return the rank of a name for which `_is_log` is true."""
    return int(name[5:-4])


def _has_notes(name: str) -> bool:
    """Return whether a file of a node has a supervisor's notes, by its name."""
    return name.startswith("printed")


def _busy_seconds(logs: Mapping[LogKey, LogFile]) -> set[int]:
    """Return the whole unix seconds in which equal lines of several ranks may have come.

    A second with a note is critical if several logs have grown in it, or if the noted second before
    or after it belongs to another log. All seconds at most `FOLD_S` + 1 from a critical second are
    busy.
    """
    owners: dict[int, LogKey | None] = {}  # the log that has grown in a second; None: several
    for key, log in logs.items():
        for second in map(int, log.times):
            if owners.setdefault(second, key) is not key:
                owners[second] = None
    seconds = sorted(owners)
    critical = {second for second in seconds if owners[second] is None}
    for before, after in itertools.pairwise(seconds):
        if owners[before] != owners[after]:
            critical |= {before, after}
    distances = range(-int(FOLD_S) - 1, int(FOLD_S) + 2)
    return {second + distance for second in critical for distance in distances}


def _cuts(log: LogFile, busy: Container[int] | None) -> list[Cut]:
    """Return the cuts of the new part of a log, in ascending order, by which its lines can be put
    in order with the lines of other logs. There is a cut at each note of a `busy` second (None: all
    are busy), and one with `is_alone` at the last of neighbouring notes that are not busy."""
    first_note = bisect_right(log.sizes, log.position)  # of the new part; an index
    if busy is None:
        return [Cut(size, False) for size in log.sizes[first_note:]]
    cuts: list[Cut] = []
    alone_size: int | None = None  # the size at the last note, if that is not busy
    for seconds, size in zip(log.times[first_note:], log.sizes[first_note:], strict=True):
        if int(seconds) not in busy:
            alone_size = size
            continue
        if alone_size is not None:
            cuts.append(Cut(alone_size, True))
            alone_size = None
        cuts.append(Cut(size, False))
    return cuts if alone_size is None else [*cuts, Cut(alone_size, True)]


def _lines_of_rank(node: str, rank: int, blocks: Iterable[Block], now: float) -> Iterator[Line]:
    """Yield a rank's blocks as `Line`s. Within a call their times never go back, and none is later
    than `now`, in unix seconds: a node's clock may be ahead."""
    latest = 0.0
    for seconds, text, is_alone in blocks:
        latest = max(latest, min(seconds, now))
        yield Line(latest, rank, node, text, is_alone)


class LineFold:
    """Folds equal lines that several ranks print at about the same time into one line. With `folds`
    False each line is passed on.

    No rank's lines change their order: the lines that a rank has printed before an equal one are
    yielded first. The methods work only as the caller iterates over their result.
    """

    def __init__(self, folds: bool) -> None:
        self._folds = folds
        self._held: list[Line] = []

    def add(self, line: Line) -> Iterator[tuple[Line, list[int]]]:
        """Add a line, which is held until lines that may be equal to it have come. Yield all lines
        that were held before, with the ranks that printed them, if the first of them is too old to
        be equal to this line (`FOLD_S`).

        A line that no other rank can have printed (`is_alone`) is yielded at once, behind all held
        lines. Where lines are not folded, each line is yielded at once.
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
        `before` (unix seconds); else yield nothing."""
        if not self._held or self._held[0].time >= before:
            return
        held, self._held = self._held, []
        parts_of: dict[int, list[bytes]] = {}
        for line in held:
            parts_of.setdefault(line.rank, []).append(line.text)
        # Most of thousands of ranks print the same: only the first of such ranks is folded.
        ranks_of: dict[bytes, list[int]] = {}
        for rank, parts in parts_of.items():
            ranks_of.setdefault(b"".join(parts), []).append(rank)
        same_ranks = {ranks[0]: ranks for ranks in ranks_of.values()}
        lines = [
            line._replace(text=text)
            for line in held
            if line.rank in same_ranks
            for text in line.text.splitlines(keepends=True)
        ]
        for line, ranks in _fold_lines(lines):
            yield line, list(itertools.chain.from_iterable(same_ranks[rank] for rank in ranks))


def _fold_lines(lines: Sequence[Line]) -> Iterator[tuple[Line, list[int]]]:
    """Yield each of the `lines`, single ones in order of time, with the ranks that printed an equal
    line; equal lines of several ranks once. The order is that of time, with an exception: the lines
    that another rank printed before an equal line come before that line."""
    queues: dict[int, deque[Line]] = {}  # of each rank, the lines that were not yielded yet
    counts: dict[bytes, Counter[int]] = {}  # of each text, how often it is in each rank's queue
    for line in lines:
        queues.setdefault(line.rank, deque()).append(line)
        counts.setdefault(line.text, Counter())[line.rank] += 1

    def pop(rank: int) -> Line:
        """Remove the first line of a rank from its queue and the counts, and return it."""
        line = queues[rank].popleft()
        counts[line.text][rank] -= 1
        return line

    yielded_early: Counter[int] = Counter()  # of each rank, its next lines that were yielded before
    for line in lines:
        if yielded_early[line.rank]:
            yielded_early[line.rank] -= 1
            continue
        pop(line.rank)
        ranks = [line.rank]
        other_ranks = [rank for rank, n in counts[line.text].items() if n and rank != line.rank]
        for rank in other_ranks:
            while True:
                first = pop(rank)
                yielded_early[rank] += 1
                if first.text == line.text:
                    break
                yield first, [rank]
            ranks.append(rank)
        yield line, ranks


def format_spans(numbers: Iterable[int]) -> str:
    """Return numbers, no two equal, as a text in ascending order, ``0-3,7``; '' without any."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
