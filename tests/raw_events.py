"""Journal lines as a damaged, an older, or any other writer would leave them."""

from __future__ import annotations

from typing import Any

from hpc_ddp.core.journal.events import JournalEvent


class RawEvent(JournalEvent):
    """An event of any name, with any fields."""

    writer = "test"

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self.event = name  # type: ignore[misc]  # of the class, elsewhere
        self._fields = fields

    def to_fields(self) -> dict[str, Any]:
        return self._fields


def raw(event: str, /, **fields: Any) -> RawEvent:
    """Return an event with these fields."""
    return RawEvent(event, fields)
