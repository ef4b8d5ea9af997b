"""Whether a run's checkpoints can be trusted, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_ddp.report.status import age, columns
from hpc_ddp.run.checkpoints import Health

COLUMNS = ("checkpoint", "saved", "MB", "ranks", "health")


def table(rows: Sequence[Health]) -> str:
    """Return one line per checkpoint, oldest first."""
    return columns(COLUMNS, [_cells(row) for row in rows])


def _cells(row: Health) -> tuple[Any, ...]:
    size = None if row.bytes is None else f"{row.bytes / 1e6:.1f}"
    good = "good, the best so far" if row.best else "good"
    return row.name, f"{age(row.age_s)} ago", size, row.world_size, row.problem or good
