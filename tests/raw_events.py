"""Journal lines as a damaged, an older, or any other writer would leave them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.core.journal.parsing import event_of


@dataclass(frozen=True)
class RawEvent(JournalEvent):
    """An event of any name, with any fields."""

    writer = "test"
    name: str
    values: dict[str, Any]

    def to_line(self) -> dict[str, Any]:
        return {"time": self.time, "event": self.name, "attempt": self.attempt, **self.values}


def raw(event: str, /, **fields: Any) -> RawEvent:
    """Return an event with these fields, to be written."""
    return RawEvent(event, fields)


NEEDED = {
    "verdict": {"cause": "failed", "action": "requeue"},
    "stopped": {"reason": "notice"},
}


def typed(event: str, /, time: float = 0.0, attempt: int = 0, **fields: Any) -> JournalEvent:
    """Return an event as it is read from a line with these fields, and those that it needs."""
    head = {"time": time, "event": event, "attempt": attempt}
    record = event_of({**head, **NEEDED.get(event, {}), **fields})
    assert record is not None, f"{event} is no event"
    return record


def changed(event: JournalEvent, **changes: Any) -> JournalEvent:
    """Return an event with other values in some fields of its kind."""
    return replace(event, **changes)


def raw_events(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's journal as they were written, by attempt and time.

    Lines that are damaged, or only half-written yet, are left out.
    """
    lines: list[dict[str, Any]] = []
    for path in sorted((folder / "journal").glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
    return sorted(lines, key=lambda line: (line["attempt"], line["time"]))
