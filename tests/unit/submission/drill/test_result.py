"""The report of a drill."""

from __future__ import annotations

from pathlib import Path

from hpc_ddp.submission.drill.result import DrillResult, Row


def test_the_report_is_a_table_and_a_verdict() -> None:
    rows = [
        Row("undisturbed, 24 steps", True),
        Row("stopped", True, 7, ()),
        Row("killed", True, 3, ("step-7: damaged",)),
    ]
    text = DrillResult("/a/train.py", Path("/runs"), rows=rows).text()
    assert "killed                 yes       step 3, past step-7  equal" in text
    assert text.endswith("equal, bit for bit, and so are the final weights")
    wrong = DrillResult("/a/train.py", Path("/runs"), verdict="wrong", why="Why.", hint="do")
    assert wrong.text().endswith("train.py does NOT resume right. Why.\nhint: do")
    assert wrong.to_dict()["folder"] == "/runs"
