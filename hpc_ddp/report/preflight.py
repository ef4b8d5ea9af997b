"""What a preflight found, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_ddp.report.status import columns
from hpc_ddp.run.journal import Event

COLUMNS = (
    *("node", "interface", "GPUs", "TMPDIR", "run folder", "clock", "torch"),
    *("sends", "receives", "health"),
)


def table(event: Event) -> str:
    """Return one line per node of an event `preflight`."""
    return columns(COLUMNS, rows(event))


def rows(event: Event) -> list[tuple[Any, ...]]:
    """Return the values of `COLUMNS` for each node, None for what is not known."""
    return [_cells(node, told) for node, told in event["report"].items()]


def _cells(node: str, told: Mapping[str, Any]) -> tuple[Any, ...]:
    ahead = told.get("clock_s")
    way = " ".join(filter(None, (told.get("interface"), told.get("address"))))
    return (
        node,
        way or None,
        told.get("gpus"),
        _free(told.get("tmpdir_free")),
        _free(told.get("scratch_free")),
        None if ahead is None else f"{ahead:+.3f} s",
        told.get("torch"),
        _speed(told.get("send_mb_s")),
        _speed(told.get("receive_mb_s")),
        ", ".join(dict.fromkeys(bad["check"] for bad in told["bad"])) or "good",
    )


def _free(count: int | None) -> str | None:
    return None if count is None else f"{count / 1e9:.1f} GB free"


def _speed(mb_s: float | None) -> str | None:
    return None if mb_s is None else f"{mb_s:.0f} MB/s"
