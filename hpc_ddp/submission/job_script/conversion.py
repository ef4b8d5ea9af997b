"""The settings of a job script, and what became of each of its lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TAKEN, OURS, LOST = "taken over", "set by hpc-ddp itself", "not taken over"


@dataclass
class Conversion:
    """The settings of a job script: (value, line) by key, or of each entry of a list.

    `marks` are group and text by line; `notes` sentences for the user with their lines.
    """

    values: dict[str, tuple[Any, int]] = field(default_factory=dict)
    lists: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    env: dict[str, tuple[str, int]] = field(default_factory=dict)
    marks: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)  # variables of the script's own arguments

    def mark(self, first: int, last: int, group: str, text: str) -> None:
        for line in range(first, last + 1):
            self.marks.setdefault(line, []).append((group, text))

    def group(self, line: int) -> tuple[str, str]:
        """Return the one group of a line, and why: what is not taken over comes before all else."""
        marks = self.marks.get(line, [(LOST, "not understood")])
        for group in (LOST, TAKEN, OURS):
            texts = [text for name, text in marks if name == group]
            if texts:
                return group, "; ".join(dict.fromkeys(filter(None, texts)))
        return LOST, "not understood"

    def append(self, key: str, assigned: str, line: int) -> None:
        entries = self.lists.setdefault(key, [])
        if key in ("args", "container-options") or assigned not in [entry for entry, _ in entries]:
            entries.append((assigned, line))

    def settings(self) -> dict[str, Any]:
        """Return all as the keys of a file."""
        lists = {key: [assigned for assigned, _ in entries] for key, entries in self.lists.items()}
        env = (
            {"env": {name: assigned for name, (assigned, _) in self.env.items()}}
            if self.env
            else {}
        )
        return {**{key: assigned for key, (assigned, _) in self.values.items()}, **lists, **env}
