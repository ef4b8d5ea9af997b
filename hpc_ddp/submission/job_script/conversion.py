"""The settings of a job script, and what became of each of its lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

# The groups of a script's lines.
TAKEN, OURS, LOST = "taken over", "set by hpc-ddp itself", "not taken over"
NO_COMPONENTS = "hpc-ddp has no heterogeneous jobs"
Mark = tuple[str, str]  # the group of a line, and the reason
TextAt = tuple[str, int]  # a text, and the line of the script that it comes from


@dataclass
class Conversion:
    """The settings of a job script, with the lines that they come from: numbers from 1; 0 for none.

    Attributes
    ----------
    values, lists
        (setting, line), and (entry, line) of each entry, by the key of a project file
    env
        (text, line) by the name of an environment variable
    marks
        groups of a line with their reasons, by line
    notes
        (line, sentence) for the user
    secrets
        values of the script's variables that are secrets, by name; they are not written
    unknown
        where a variable that can't be taken over is set, as ``line 7``, by its name
    """

    values: dict[str, tuple[Any, int]] = field(default_factory=dict)
    lists: dict[str, list[TextAt]] = field(default_factory=dict)
    env: dict[str, TextAt] = field(default_factory=dict)
    marks: dict[int, list[Mark]] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def mark(self, first: int, last: int, group: str, text: str) -> None:
        """Add a mark, the `group` and its reason (`text`), to each line from `first` to `last`."""
        for line in range(first, last + 1):
            self.marks.setdefault(line, []).append((group, text))

    def note(self, line: int, sentence: str) -> None:
        """Add a note for the user on a line, or with 0 on the whole script."""
        self.notes.append((line, sentence))

    def group(self, line: int) -> Mark:
        """Return the group that counts for a line with several marks (LOST before TAKEN before
        OURS), and all its reasons for that group, joined by ``; ``. A line without a mark is LOST,
        "not understood"."""
        groups = dict(self.marks.get(line, [(LOST, "not understood")]))
        group = next(group for group in (LOST, TAKEN, OURS) if group in groups)
        return group, self.reasons(line, group) or groups[group]

    def reasons(self, line: int, group: str) -> str:
        """Return all reasons of a line for one group, in one text; '' where it has none."""
        texts = (text for name, text in self.marks.get(line, []) if name == group)
        return "; ".join(dict.fromkeys(texts))  # each once

    def entries(self) -> list[tuple[Any, int]]:
        """Return all settings, variables and entries of lists, each with its line."""
        lists = [entry for entries in self.lists.values() for entry in entries]
        return [*self.values.values(), *self.env.values(), *lists]

    def lines_lost_in_part(self) -> set[int]:
        """Return the numbers of the lines of which a part alone is lost: they have marks of LOST
        and of TAKEN, and a setting comes from them."""
        lines = {line for _, line in self.entries()} & self.marks.keys()
        return {line for line in lines if {TAKEN, LOST} <= dict(self.marks[line]).keys()}

    def append(self, key: str, entry: str, line: int) -> None:
        """Append an entry, of a `line`, to the list of a key. A second equal one changes nothing in
        ``expand``, ``env-names`` and ``without``."""
        entries = self.lists.setdefault(key, [])
        is_set = key in ("expand", "env-names", "without")
        if not is_set or entry not in dict(entries):
            entries.append((entry, line))

    def leave_out_each(self) -> Iterator[tuple[Conversion, str, int]]:
        """Yield, for each setting, then each variable of ``env``, then each entry of a list: a
        conversion that lacks it, its name (for an entry the key and the text), and its line. Marks
        and notes of such a conversion are this one's, so that a change of them holds for all."""
        for key, (_, line) in self.values.items():
            values = {name: entry for name, entry in self.values.items() if name != key}
            yield replace(self, values=values), key, line
        for key, (_, line) in self.env.items():
            env = {name: entry for name, entry in self.env.items() if name != key}
            yield replace(self, env=env), key, line
        for key, entries in self.lists.items():
            for index, (text, line) in enumerate(entries):
                lists = {**self.lists, key: entries[:index] + entries[index + 1 :]}
                yield replace(self, lists=lists), f"{key} {text}", line

    def settings(self) -> dict[str, Any]:
        """Return all settings by the keys of a project file; ``env`` only if it has variables."""
        single = {key: setting for key, (setting, _) in self.values.items()}
        lists = {key: [entry for entry, _ in entries] for key, entries in self.lists.items()}
        env = {name: text for name, (text, _) in self.env.items()}
        return {**single, **lists, **({"env": env} if env else {})}
