"""Tables for people: columns of text, checkpoints, nodes of a preflight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpc_ddp.core.checkpoints import Health
from hpc_ddp.core.console.terminal import one_line
from hpc_ddp.core.console.units import byte_count, duration, speed
from hpc_ddp.core.journal.events import PreflightEnded

CHECKPOINT_COLUMNS = ("checkpoint", "saved", "size", "ranks", "health")
# fmt: off
PREFLIGHT_COLUMNS = (
    "node", "interface", "GPUs", "TMPDIR", "run folder", "torch", "exchange", "all-reduce",
    "health",
)
# fmt: on


def columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows below a header, in aligned columns; the header alone without rows. None is shown
    as ``-``, and control characters in the rows are replaced. Raise ValueError for a row of another
    length than the header."""
    cells = [["-" if cell is None else one_line(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in ([*header], *cells)
    )
    return "\n".join(lines)


def checkpoint_table(rows: Sequence[Health]) -> str:
    """Return a table with one line per checkpoint, in the order of `rows`; the header alone without
    any."""
    return columns(CHECKPOINT_COLUMNS, [_checkpoint_cells(row) for row in rows])


def _checkpoint_cells(row: Health) -> tuple[object, ...]:
    """Return the row of a checkpoint, by `CHECKPOINT_COLUMNS`; None for an unknown size or number
    of ranks."""
    size = _optional(byte_count, row.bytes)
    good = "good, the best so far" if row.best else "good"
    return row.name, f"{duration(row.age_s)} ago", size, row.world_size, row.problem or good


def preflight_table(event: PreflightEnded) -> str:
    """Return a table with one line per node of an event `preflight`; the header alone without any.

    Where the event has only some nodes, the lowest, the median and the highest of all follow. Raise
    KeyError for a node without the list of its faults, and AttributeError or TypeError for a report
    that is damaged otherwise.
    """
    rows = [_preflight_cells(node, report) for node, report in event.report.items()]
    if event.summary and event.summary["nodes"] > len(event.report):
        for index, name in enumerate(("lowest", "median", "highest")):
            numbers = {key: row[index] for key, row in event.summary["quantiles"].items()}
            label = f"({name} of {event.summary['nodes']})"
            rows.append((*_preflight_cells(label, {**numbers, "bad": []})[:-1], None))
    return columns(PREFLIGHT_COLUMNS, rows)


def _preflight_cells(node: str, report: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the row of a node, by `PREFLIGHT_COLUMNS`; None for an empty cell. Raise KeyError for
    a `report` without the list of its faults."""
    interface = " ".join(filter(None, (report.get("interface"), report.get("address"))))
    return (
        node,
        interface or None,
        report.get("gpus"),
        _optional(_free, report.get("tmpdir_free")),
        _optional(_free, report.get("scratch_free")),
        report.get("torch"),
        _optional(speed, report.get("exchange_mb_s")),
        _optional(speed, report.get("all_reduce_mb_s")),
        ", ".join(dict.fromkeys(fault["check"] for fault in report["bad"])) or "good",
    )


def _optional(format_amount: Callable[[float], str], amount: float | None) -> str | None:
    """Return the text that `format_amount` makes of an amount; None for None."""
    return None if amount is None else format_amount(amount)


def _free(count: float) -> str:
    """Return free space, in bytes, as ``4.2 GB free``."""
    return f"{byte_count(count)} free"
