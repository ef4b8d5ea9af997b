"""Lines of several ranks."""

from __future__ import annotations

from hpc_ddp.report.logs.merge import format_spans


def test_ranks_are_written_as_spans() -> None:
    assert format_spans([3, 0, 1, 2, 7]) == "0-3,7"
