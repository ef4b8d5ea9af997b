"""Lines of several ranks."""

from __future__ import annotations

from hpc_ddp.report.logs.merge import spans


def test_ranks_are_written_as_spans() -> None:
    assert spans([3, 0, 1, 2, 7]) == "0-3,7"
