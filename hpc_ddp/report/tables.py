"""Tables for people: columns of text, checkpoints, nodes of a preflight, a script's origins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpc_ddp.run.checkpoints import Health
from hpc_ddp.run.journal import Event
from hpc_ddp.run.units import byte_count, duration, speed

if TYPE_CHECKING:
    from rich.console import Console

CHECKPOINT_COLUMNS = ("checkpoint", "saved", "size", "ranks", "health")
# fmt: off
PREFLIGHT_COLUMNS = (
    "node", "interface", "GPUs", "TMPDIR", "run folder", "clock", "torch", "sends", "receives",
    "health",
)
# fmt: on
ORIGIN_COLOURS = {
    "option": "green",
    "project": "cyan",
    "site": "cyan",
    "operators": "cyan",
    "run": "cyan",
    "profile": "blue",
    "fabric": "blue",
    "template": "magenta",
}


def columns(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows below a header, in aligned columns; None is shown as ``-``."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in ([*header], *cells)
    )
    return "\n".join(lines)


def checkpoint_table(rows: Sequence[Health]) -> str:
    """Return one line per checkpoint, oldest first."""
    return columns(CHECKPOINT_COLUMNS, [_checkpoint_cells(row) for row in rows])


def _checkpoint_cells(row: Health) -> tuple[Any, ...]:
    size = None if row.bytes is None else byte_count(row.bytes)
    good = "good, the best so far" if row.best else "good"
    return row.name, f"{duration(row.age_s)} ago", size, row.world_size, row.problem or good


def preflight_table(event: Event) -> str:
    """Return one line per node of an event `preflight`."""
    rows = [_preflight_cells(node, report) for node, report in event["report"].items()]
    return columns(PREFLIGHT_COLUMNS, rows)


def _preflight_cells(node: str, report: Mapping[str, Any]) -> tuple[Any, ...]:
    ahead_s = report.get("clock_s")
    interface = " ".join(filter(None, (report.get("interface"), report.get("address"))))
    return (
        node,
        interface or None,
        report.get("gpus"),
        _free(report.get("tmpdir_free")),
        _free(report.get("scratch_free")),
        None if ahead_s is None else f"{ahead_s:+.3f} s",
        report.get("torch"),
        _speed(report.get("send_mb_s")),
        _speed(report.get("receive_mb_s")),
        ", ".join(dict.fromkeys(fault["check"] for fault in report["bad"])) or "good",
    )


def _free(count: int | None) -> str | None:
    return None if count is None else f"{byte_count(count)} free"


def _speed(megabytes_per_s: float | None) -> str | None:
    return None if megabytes_per_s is None else speed(megabytes_per_s)


def show_origins(rows: Sequence[tuple[str, str, str]], console: Console | None = None) -> None:
    """Print a script, each line behind its origin; an origin equal to the previous line's is blank.

    Parameters
    ----------
    rows
        for each line its origin's source, its origin in words, and the line
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    width = max(len(label) for _, label, _ in rows)
    # On a terminal a long line goes on below itself; in a file or a pipe it stays one line.
    room = max(20, console.width - width - 2) if console.is_terminal else None
    previous = ""
    for source, label, line in rows:
        shown = "" if label == previous or not line else label
        previous = label if line else previous
        for piece in _pieces(line, room):
            text = Text(f"{shown:{width}}  ", ORIGIN_COLOURS.get(source, "dim"))
            text.append(piece, "default not dim")
            if not line:
                text.rstrip()
            console.print(text, soft_wrap=True)
            shown = ""


def _pieces(line: str, room: int | None) -> list[str]:
    room = room or max(1, len(line))
    return [line[start : start + room] for start in range(0, len(line), room)] or [""]
