"""The journal of a run: append-only events, one file per writer.

One file per writer because appends from several hosts tear on NFS and Lustre. A reader
merges them by attempt, then time (clocks differ between hosts, attempts don't overlap).
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.core.retry import patiently

Event = dict[str, Any]

DRAIN_S = 5.0  # that a process waits for its last lines when it ends
# Of no attempt, and maybe days later.
FROM_LOGIN_NODE = ("submitted", "queued", "cancelled", "rerun")
_ALWAYS: dict[str, Any] = {"time": (int, float), "event": str, "attempt": int}
# What readers count on where it is there; of a verdict it has to be.
_SOME: dict[str, Any] = {"step": (int, float), "nodes": list, "why": str, "cause": str}
_VERDICT = ("cause", "action", "why")


class Journal:
    """Appends events to ``<folder>/<writer>.jsonl``.

    A line is one JSON object: ``time`` (unix seconds), ``event``, ``attempt`` (0 for the
    first), and what belongs to the event. Writing never raises: a full disk must not end a
    training that could go on. The first failure is said on stderr.
    """

    def __init__(self, folder: Path, writer: str, attempt: int = 0) -> None:
        self.path = folder / f"{writer}.jsonl"
        self.attempt = attempt
        self._warned = False
        self._later: SimpleQueue[bytes | threading.Event] | None = None
        self._thread_of = 0  # the process that has the thread

    def write(self, event: JournalEvent) -> None:
        """Append one event."""
        try:
            self._append(self._line(event))
        except OSError as error:
            self._warn(error)

    def write_later(self, event: JournalEvent) -> None:
        """Let a thread append an event: no step of a training waits for a disk in trouble.

        The process may end without it, unless it calls `drain`.
        """
        if self._later is None or self._thread_of != os.getpid():  # a fork has no such thread
            self._later, self._thread_of = SimpleQueue(), os.getpid()
            threading.Thread(target=self._write_queued, args=[self._later], daemon=True).start()
            atexit.register(self.drain)
        self._later.put(self._line(event))

    def drain(self, seconds: float = DRAIN_S) -> None:
        """Wait until the events of `write_later` are written, at most so long."""
        if self._later is not None and self._thread_of == os.getpid():
            written = threading.Event()
            self._later.put(written)
            written.wait(seconds)

    def _write_queued(self, queue: SimpleQueue[bytes | threading.Event]) -> None:
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
        """Append an event that a verdict hangs on, `patiently`."""
        try:
            patiently(partial(self._append, self._line(event)))
        except OSError as error:
            self._warn(error)

    def _line(self, event: JournalEvent) -> bytes:
        head = {"time": round(time.time(), 3), "event": event.event, "attempt": self.attempt}
        return json.dumps({**head, **event.to_fields()}).encode() + b"\n"

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            say(f"can't write the journal {self.path}: {error}")

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        # A worker writes with its user's umask; what stands here decides which jobs are cancelled.
        with open(self.path, "ab+", opener=partial(os.open, mode=0o644)) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a torn line of a killed writer: close it off
                    line = b"\n" + line
            file.write(line)


def read_events(folder: Path) -> list[Event]:
    """Return all events of a journal folder, by attempt and time. Torn lines are skipped."""
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in events_of(path)]
    return sorted(events, key=_order)


def read_briefly(folder: Path) -> list[Event]:
    """Return the same, but of each writer's `metrics` only the last in full, and of the others
    time, attempt and step. A long run has tens of thousands: this takes a quarter of the time."""
    events: list[Event] = []
    for path in sorted(folder.glob("*.jsonl")):
        last: Event | None = None
        for line in path.read_bytes().splitlines():
            brief = _METRICS.match(line)
            if brief:
                when, attempt, step = brief.groups()
                last = {
                    "time": float(when),
                    "event": "metrics",
                    "attempt": int(attempt),
                    "step": int(step),
                    "line": line,
                }
                events.append(last)
            elif event := parse_event(line):
                events.append(event)
        if last:
            last.update(parse_event(last["line"]) or {})
    return sorted(events, key=_order)


# As `Journal` writes them, in whole.
_METRICS = re.compile(
    rb'\{"time": (\d+\.?\d*), "event": "metrics", "attempt": (\d+), "step": (\d+)[,}](?:.*\})?$'
)


def _order(event: Event) -> tuple[int, float]:
    return event["attempt"], event["time"]


def events_of(path: Path) -> Iterator[Event]:
    """Yield the events of one writer, as they were written."""
    for line in path.read_bytes().splitlines():
        if event := parse_event(line):
            yield event


def parse_event(line: bytes | str) -> Event | None:
    """Return the event of a line, None for what is none, or damaged."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and _is_sound(event) else None


def _is_sound(event: Event) -> bool:
    """Tell whether an event has what it must have, as a damaged file may not."""
    always = all(isinstance(event.get(name), kind) for name, kind in _ALWAYS.items())
    some = all(isinstance(event.get(n, None), (k, type(None))) for n, k in _SOME.items())
    if not (always and some and math.isfinite(event["time"])):
        return False
    return event["event"] != "verdict" or all(isinstance(event.get(n), str) for n in _VERDICT)


def is_finished(events: list[Event]) -> bool:
    """Tell from a run's events whether it has reached its end."""
    last = last_event(events, "verdict", "finished")
    return last is not None and "finished" in (last["event"], last.get("cause"))


def last_event(events: list[Event], *names: str) -> Event | None:
    """Return the last of the events with one of these names, or None."""
    return next((event for event in reversed(events) if event["event"] in names), None)


def node_seconds(events: list[Event], now: float | None = None) -> float:
    """Return the seconds of all attempts, each times its nodes.

    An attempt lasts until its verdict; the newest one, where it has none yet, until `now`.
    """
    events = [event for event in events if event["event"] not in FROM_LOGIN_NODE]
    total = 0.0
    begun = [event for event in events if event["event"] == "started" and event.get("nodes")]
    for start in begun:
        of_attempt = [event for event in events if event["attempt"] == start["attempt"]]
        verdict = last_event(of_attempt, "verdict")
        end = verdict["time"] if verdict else max(event["time"] for event in of_attempt)
        if now is not None and start is begun[-1] and not verdict:
            end = max(end, now)
        total += max(0.0, end - start["time"]) * len(start["nodes"])
    return total
