"""Events at a time of their own."""

from __future__ import annotations

from typing import Any

from hpc_ddp.core.journal.events import JournalEvent
from tests.raw_events import typed


def event_at(event: str, time: float = 1.0, attempt: int = 0, **fields: Any) -> JournalEvent:
    return typed(event, time, attempt, **fields)
