"""A script beside the origins of its lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {
    "option": "green",
    **dict.fromkeys(("project", "site", "operators", "run"), "cyan"),
    **dict.fromkeys(("profile", "fabric"), "blue"),
    "template": "magenta",
}


def show(rows: Sequence[tuple[str, str, str]], console: Console | None = None) -> None:
    """Print a script, each line behind its origin. What is as in the line above is not repeated.

    Parameters
    ----------
    rows
        for each line its origin's source, its origin in words, and the line
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    wide = max(len(label) for _, label, _ in rows)
    # On a terminal a long line goes on below itself; for a file or a pipe it stays whole.
    room = max(20, console.width - wide - 2) if console.is_terminal else None
    before = ""
    for source, label, line in rows:
        told = "" if label == before or not line else label
        before = label if line else before
        for n, piece in enumerate(_pieces(line, room)):
            text = Text(f"{'' if n else told:{wide}}  ", COLOURS.get(source, "dim"))
            text.append(piece, "default not dim")
            if not line:
                text.rstrip()
            console.print(text, soft_wrap=True)


def _pieces(line: str, room: int | None) -> list[str]:
    room = room or max(1, len(line))
    return [line[at : at + room] for at in range(0, len(line), room)] or [""]
