"""docs/bad-days.md says what the tests' markers and the newest results say."""

from __future__ import annotations

import bad_days


def test_the_page_is_up_to_date() -> None:
    assert bad_days.PAGE.read_text() == bad_days.page(), "python tests/unit/bad_days.py"


def test_each_row_has_one_promise() -> None:
    rows = bad_days.rows()
    assert len(rows) > 20
    assert all(row.promise and row.tests for row in rows)
