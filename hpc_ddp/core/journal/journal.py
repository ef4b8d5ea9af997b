"""Writes and reads the journal of a run: append-only events, one file per writer.

One file per writer because appends from several hosts tear on NFS and Lustre. A reader
merges them by attempt, then time (clocks differ between hosts, attempts don't overlap).
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.file_io import list_names, patiently
from hpc_ddp.core.journal.enums import Cause
from hpc_ddp.core.journal.events import (
    LOGIN_NODE,
    CheckpointRestored,
    CheckpointSaved,
    Finished,
    Fresh,
    JournalEvent,
    MetricsLine,
    Started,
    StepTiming,
    TeardownBegun,
    VerdictGiven,
    WorkerStarted,
    step_of,
)
from hpc_ddp.core.journal.line_reader import CURVE_START, LineReader
from hpc_ddp.core.journal.parsing import event_of, parse_event
from hpc_ddp.core.journal.stragglers import IN_A_ROW

E = TypeVar("E", bound=JournalEvent)

# A worker has its user's umask; what a journal says decides which jobs are cancelled.
FILE_MODE = 0o644
_APPENDING = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
LINES_AT_ONCE = 200  # are parsed in one call; a damaged one has so many parsed again
DRAIN_S = 5.0  # that a process waits for its last lines when it ends


class Journal:
    """Appends events to ``<folder>/<writer>.jsonl``; `attempt` is the number of the attempt in each
    event.

    A line is one JSON object: ``time`` (unix seconds), ``event``, ``attempt`` (0 for the first),
    and the event's own fields. Writing never raises OSError: a full disk must not end a training
    that could go on. The first event that the disk refuses is reported on stderr, later ones are
    not. An event with a value that JSON does not have raises TypeError, from each method that
    writes.
    """

    def __init__(self, folder: Path, writer: str, attempt: int = 0) -> None:
        self.path = folder / f"{writer}.jsonl"
        self.attempt = attempt
        self._warned = False
        self._later: SimpleQueue[bytes | threading.Event] | None = None  # lines for the thread
        self._thread_of = 0  # the id of the process that has the thread

    def write(self, event: JournalEvent) -> None:
        """Append one event; the folder is made where it is missing. An event that the disk refuses
        is lost, which is reported on stderr the first time."""
        try:
            self._append(self._line(event))
        except OSError as error:
            self._warn(error)

    def write_later(self, event: JournalEvent) -> None:
        """Have a thread append an event, so that no step of a training waits for a disk in trouble.

        The first call starts the thread. An orderly end of Python waits for the event (see
        `drain`); any other end of the process may come before it is written. An event that the disk
        refuses is lost, which is reported on stderr the first time.
        """
        if self._later is None or self._thread_of != os.getpid():  # a fork has no such thread
            self._later, self._thread_of = SimpleQueue(), os.getpid()
            threading.Thread(target=self._write_queued, args=[self._later], daemon=True).start()
            atexit.register(self.drain)
        self._later.put(self._line(event))

    def drain(self, seconds: float = DRAIN_S) -> None:
        """Wait until the events of `write_later` are written or refused, `seconds` at most; return
        at once where there are none. The caller does not learn whether they are written."""
        if self._later is not None and self._thread_of == os.getpid():
            written = threading.Event()
            self._later.put(written)
            written.wait(seconds)

    def _write_queued(self, queue: SimpleQueue[bytes | threading.Event]) -> None:
        """Append the lines of a queue for ever, in the thread of `write_later`; set each
        `threading.Event` of the queue, for which `drain` waits. A line that the disk refuses is
        lost, and reported by `_warn`."""
        while True:
            line = queue.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._append(line)
            except OSError as error:
                self._warn(error)

    def write_surely(self, event: JournalEvent) -> None:
        """Append an event that a verdict relies on, and try again for a minute (`patiently`). An
        event that the disk still refuses is lost, which is reported on stderr the first time."""
        try:
            patiently(partial(self._append, self._line(event)))
        except OSError as error:
            self._warn(error)

    def _line(self, event: JournalEvent) -> bytes:
        """Return an event as a line of the file, with the present time and the journal's attempt.
        Raise TypeError for a value that JSON does not have."""
        written = replace(event, time=round(time.time(), 3), attempt=self.attempt)
        return json.dumps(written.to_line()).encode() + b"\n"

    def _warn(self, error: OSError) -> None:
        """Report on stderr that the journal can't be written; the first time only."""
        if not self._warned:
            self._warned = True
            say(f"can't write the journal {self.path}: {error}")

    def _append(self, line: bytes) -> None:
        """Append a line to the file; the folder is made where it is missing. Raise OSError where
        the disk refuses. This asks no more of the disk than an open, a read of a byte and a
        write."""
        try:
            file = os.open(self.path, _APPENDING, FILE_MODE)
        except FileNotFoundError:
            self.path.parent.mkdir(exist_ok=True, mode=0o755)
            file = os.open(self.path, _APPENDING, FILE_MODE)
        try:
            size = os.lseek(file, 0, os.SEEK_END)
            # A killed writer may have left half a line: that ends here.
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(file, line) :]
        finally:
            os.close(file)


def read_events(folder: Path, writer: str = "") -> list[JournalEvent]:
    """Return all events of a journal folder, or those of a `writer`, sorted by attempt and time; []
    for a missing folder. Damaged lines and unknown kinds of events are left out. Raise OSError
    where the folder can't be listed, or a file can't be read or is too large."""
    names = _file_names(folder)
    names = [name for name in names if name == f"{writer}.jsonl"] if writer else names
    of_files = LineReader().read_folder(folder, names)
    events = [event for lines in of_files for event in _parse_lines(lines)]
    return sorted(events, key=_sort_key)


def _parse_lines(lines: Iterator[bytes]) -> Iterator[JournalEvent]:
    """Yield the events of a file's lines, in order; damaged lines and unknown kinds of events are
    left out."""
    while chunk := list(itertools.islice(lines, LINES_AT_ONCE)):
        try:  # a list in one call of the parser: half the time of a call for each line
            entries = json.loads(b"[%s]" % b",".join(chunk))
            events = [event_of(entry) for entry in entries]
            is_sound = len(entries) == len(chunk)
        except (ValueError, RecursionError):
            is_sound = False
        yield from filter(None, events if is_sound else map(parse_event, chunk))


def _file_names(folder: Path) -> list[str]:
    """Return the names of the writers' files, sorted; [] for a missing folder. Raise OSError where
    it can't be listed."""
    return sorted(name for name in list_names(folder) if name.endswith(".jsonl"))


def read_briefly(folder: Path) -> list[JournalEvent]:
    """Return the events as `read_events` does. But events `metrics` and `ranks` have only their
    time, attempt and step, except the last ones of each writer, as many of each kind as `WHOLE`
    says.

    A long run has tens of thousands: this takes a third of the time. Raise OSError where the folder
    can't be listed, or a file can't be read or is too large.
    """
    events: list[JournalEvent] = []
    for lines in LineReader().read_folder(folder, _file_names(folder)):
        # By kind: the indexes in `events` and the lines of the last ones, which are parsed whole.
        last = {kind: deque[tuple[int, bytes]](maxlen=count) for kind, count in WHOLE.items()}
        for line in lines:
            if brief := _BRIEF.match(line):
                when, kind, attempt, step = brief.groups()
                last[kind].append((len(events), line))
                events.append(_brief_event(kind, int(step), float(when), int(attempt)))
            elif event := parse_event(line):
                events.append(event)
        for index, line in itertools.chain(*last.values()):
            events[index] = parse_event(line) or events[index]
    return sorted(events, key=_sort_key)


WHOLE = {b"metrics": 1, b"ranks": IN_A_ROW}
# A complete line, as `Journal` writes it.
_BRIEF = re.compile(CURVE_START + rb', "attempt": (\d{1,14}), "step": (\d{1,14})[,}](?:.*\})?$')


def _brief_event(kind: bytes, step: int, time: float, attempt: int) -> JournalEvent:
    """Return an event of the `kind`, metrics or ranks, with only its step, time and attempt; the
    other fields are 0 or empty."""
    if kind == b"ranks":
        return StepTiming(step, 0, 0.0, (), (), (), 0, "", time=time, attempt=attempt)
    return MetricsLine({"step": step}, time=time, attempt=attempt)


def _sort_key(event: JournalEvent) -> tuple[int, float]:
    """Return the key that sorts events: the attempt, and the time in unix seconds."""
    return event.attempt, event.time


def events_of(path: Path) -> Iterator[JournalEvent]:
    """Yield the events of one writer's file, in their order; damaged lines and unknown kinds of
    events are left out.

    Raise OSError where the file can't be read, or is too large.
    """
    for line in LineReader().read(path):
        if event := parse_event(line):
            yield event


def is_finished(events: Sequence[JournalEvent]) -> bool:
    """Return whether a run has reached its end, by its journal. The newest attempt that has a
    verdict, a `teardown` or a `finished` decides: by its last verdict, or without one by the cause
    that stood fixed before its teardown, or else by `finished`. False where no attempt has any. A
    verdict ``superseded`` decides nothing: Slurm may start a job again, for a node that was cut
    off, after the training has finished there.

    Where the exit code counts (see `Finished`), `finished` alone is enough only if the run was
    started plainly: then no verdict follows.
    """
    ends = [event for event in events if not _is_superseded(event)]
    last = last_event(ends, VerdictGiven, TeardownBegun, Finished)
    if last is None:
        return False
    # Their clocks may differ, where the verdict is made on a login node (salloc).
    ends = [event for event in ends if event.attempt == last.attempt]
    if end := last_event(ends, VerdictGiven) or last_event(ends, TeardownBegun):
        return end.cause is Cause.FINISHED
    started = last_event(ends, Started)
    has_launcher = started is not None and started.nodes is not None
    by_code = isinstance(last, Finished) and (last.at_exit or last.within)
    return not (has_launcher and by_code)


def _is_superseded(event: JournalEvent) -> bool:
    """Return whether an event is the verdict of an attempt that a newer attempt has superseded."""
    return isinstance(event, VerdictGiven) and event.cause is Cause.SUPERSEDED


def last_event(events: Sequence[JournalEvent], *kinds: type[E]) -> E | None:
    """Return the last of the events that is of one of these kinds; None without one."""
    return next((event for event in reversed(events) if isinstance(event, kinds)), None)


def first_attempt(events: Sequence[JournalEvent]) -> int:
    """Return the number of the attempt that began the run anew (``--fresh``), 0 where none did."""
    fresh = last_event(events, Fresh)
    return fresh.first_attempt if fresh else 0


def last_step(events: Sequence[JournalEvent]) -> int | None:
    """Return the step of the last event that has a step; None where none has."""
    steps = (step_of(event) for event in reversed(events))
    return next((step for step in steps if step is not None), None)


def attempts_with_progress(events: Iterable[JournalEvent]) -> set[int]:
    """Return the numbers of the attempts that have saved a newer checkpoint than the one that they
    began with, or without that any before them. The end of a training that was finished already is
    saved once more, at the same step. `events` are in order, by attempt and time."""
    begun_at: dict[int, int] = {}
    newest, numbers = -1, set()
    for event in events:
        if isinstance(event, CheckpointRestored):
            begun_at.setdefault(event.attempt, event.step)
        elif isinstance(event, CheckpointSaved):
            if event.step > begun_at.setdefault(event.attempt, newest):
                numbers.add(event.attempt)
            newest = max(newest, event.step)
    return numbers


def by_attempt(events: Iterable[JournalEvent]) -> dict[int, list[JournalEvent]]:
    """Return the events of each attempt in their order, by its number.

    Events of the login node are left out: they belong to no attempt, and may be written days later.
    """
    attempts: dict[int, list[JournalEvent]] = {}
    for event in events:
        if event.writer != LOGIN_NODE:
            attempts.setdefault(event.attempt, []).append(event)
    return attempts


def by_start(events: Iterable[JournalEvent]) -> list[list[JournalEvent]]:
    """Return the events of each start of the workers, in order, without the login node's.

    An attempt has one start, and a further one for each restart within it (``--max-restarts``). The
    batch script's events before an attempt's first start belong to this start; an attempt without
    any start counts as one.
    """
    starts: list[list[JournalEvent]] = []
    for attempt in by_attempt(events).values():
        starting = [i for i, event in enumerate(attempt) if isinstance(event, WorkerStarted)]
        bounds = [0, *starting[1:], len(attempt)]  # the first one is no restart
        starts += [attempt[begin:end] for begin, end in itertools.pairwise(bounds)]
    return starts


def node_seconds(events: Sequence[JournalEvent], now: float | None = None) -> float:
    """Return the seconds that all attempts lasted, each times the number of its nodes.

    An attempt lasts until its verdict, else until its last event. The newest attempt, where it has
    no verdict, lasts until `now` (unix seconds), if given. Attempts without names of nodes count
    nothing.
    """
    total = 0.0
    attempts = by_attempt(events)
    starts = [event for event in events if isinstance(event, Started) and event.nodes]
    for start in starts:
        verdict = last_event(attempts[start.attempt], VerdictGiven)
        end = verdict.time if verdict else max(event.time for event in attempts[start.attempt])
        if now is not None and start is starts[-1] and not verdict:
            end = max(end, now)
        total += max(0.0, end - start.time) * len(start.nodes or ())
    return total
