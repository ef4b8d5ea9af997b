"""Edits of a public program's text: what they look for is a regular expression, so that this
repository holds the lines that are added, and none of the program's own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

Edit = Callable[[str], str]


class EditError(Exception):
    """A program has changed since its edits were written."""


def change(pattern: str, replacement: str, *, count: int = 1) -> Edit:
    """Replace what matches (^ and $ are those of a line); it must match `count` times."""

    def apply(text: str) -> str:
        result, matches = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if matches != count:
            raise EditError(f"{pattern!r} matches {matches} times, in place of {count}")
        return result

    return apply


def add_after(pattern: str, lines: str) -> Edit:
    """Add lines behind the line that matches, indented as that one."""
    return change(
        rf"^([ \t]*)({pattern}[^\n]*)$",
        r"\1\2" + "".join(rf"\n\1{line}" for line in lines.split("\n")),
    )


def drop(first: str, last: str = "", *, count: int = 1) -> Edit:
    """Drop the line that matches `first`, or all up to the next one that matches `last`."""
    rest = rf"(?:.*\n)*?[ \t]*{last}.*\n" if last else ""
    return change(rf"^[ \t]*{first}.*\n{rest}", "", count=count)


def append(lines: str) -> Edit:
    """Add lines at the end."""
    return lambda text: f"{text.rstrip()}\n{lines}\n"


def apply(edits: Iterable[Edit], text: str) -> str:
    """Return the edited text; raise EditError where one does not fit."""
    for edit in edits:
        text = edit(text)
    return text


def new_lines(before: str, after: str) -> list[str]:
    """Return the lines that were added or changed, blank ones and comments apart."""
    differences = difflib.ndiff(before.splitlines(), after.splitlines())
    lines = [line[2:] for line in differences if line.startswith("+ ")]
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]
