"""Parses the lines of a journal: leniently, since a line may be another version's or damaged."""

from __future__ import annotations

from typing import Any

from hpc_ddp.core.file_io import parse_object
from hpc_ddp.core.journal.events import EVENTS, JournalEvent
from hpc_ddp.core.journal.fields import checked

_BY_NAME = {kind.event: kind for kind in EVENTS}


def parse_event(line: bytes | str) -> JournalEvent | None:
    """Return the event of a line; None for a damaged line, and for an unknown kind of event."""
    try:
        return event_of(parse_object(line))
    except ValueError:
        return None


def event_of(line: Any) -> JournalEvent | None:
    """Return the event of a line's JSON value; None for no object, and for an unknown kind. Raise
    ValueError for a value of another type, and for a missing time, attempt or cause, say."""
    kind = _BY_NAME.get(str(line.get("event"))) if isinstance(line, dict) else None
    if kind is None:
        return None
    time, attempt = checked(line.get("time"), "float"), checked(line.get("attempt"), "int")
    return kind(**kind.read_fields(line), time=time, attempt=attempt)
