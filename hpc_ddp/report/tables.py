"""Tables as text: aligned columns, checkpoints, nodes of a preflight."""

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


def align_columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a header, and the rows below it, as text in aligned columns. None is shown as ``-``,
    and control characters in the rows are replaced. Raise ValueError for a row of another length
    than the header."""
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
    return align_columns(CHECKPOINT_COLUMNS, [_checkpoint_cells(row) for row in rows])


def _checkpoint_cells(row: Health) -> tuple[object, ...]:
    """Return the cells of a checkpoint's row, by `CHECKPOINT_COLUMNS`; None for an unknown size or
    number of ranks."""
    size = _format_optional(byte_count, row.bytes)
    good = "good, the best so far" if row.best else "good"
    return row.name, f"{duration(row.age_s)} ago", size, row.world_size, row.problem or good


def preflight_table(event: PreflightEnded) -> str:
    """Return a table with one line per node of an event `preflight`; the header alone without any.

    Where the event has only some of the nodes, three lines follow with the lowest, the median and
    the highest number of all nodes in each column. Raise KeyError for a node without the list of
    its faults, and AttributeError or TypeError for a report that is damaged otherwise.
    """
    rows = [_preflight_cells(node, report) for node, report in event.report.items()]
    if event.summary and event.summary["nodes"] > len(event.report):
        for index, name in enumerate(("lowest", "median", "highest")):
            numbers = {key: row[index] for key, row in event.summary["quantiles"].items()}
            label = f"({name} of {event.summary['nodes']})"
            # All cells but the last, the health, which is one of a node.
            rows.append((*_preflight_cells(label, {**numbers, "bad": []})[:-1], None))
    return align_columns(PREFLIGHT_COLUMNS, rows)


def _preflight_cells(node: str, report: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the cells of a node's row, by `PREFLIGHT_COLUMNS`; None for an empty cell. Raise
    KeyError for a `report` without the list of its faults."""
    interface = " ".join(filter(None, (report.get("interface"), report.get("address"))))
    return (
        node,
        interface or None,
        report.get("gpus"),
        _format_optional(_free_space, report.get("tmpdir_free")),
        _format_optional(_free_space, report.get("scratch_free")),
        report.get("torch"),
        _format_optional(speed, report.get("exchange_mb_s")),
        _format_optional(speed, report.get("all_reduce_mb_s")),
        ", ".join(dict.fromkeys(fault["check"] for fault in report["bad"])) or "good",
    )


def _format_optional(format_amount: Callable[[float], str], amount: float | None) -> str | None:
    """Return the text that `format_amount` makes of an amount; None for None."""
    return None if amount is None else format_amount(amount)


def _free_space(count: float) -> str:
    """Return free space, in bytes, as ``4.2 GB free``."""
    return f"{byte_count(count)} free"
