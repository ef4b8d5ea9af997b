"""The page docs/bad-days.md follows the tests' markers and the newest results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import suites
from tools.store import Line, Store
from unit.repository import bad_days

GO = "tests/slurm/test_a.py::test_go"


def result(variant: str, outcome: str = "passed", commit: str = "b2", suite: str = "own") -> Line:
    test = f"{GO}[{variant}]"
    line = {"row": f"{suite} {test}", "suite": suite, "test": test, "outcome": outcome}
    return {**line, "commit": commit, "date": "2026-11-22"}


@pytest.mark.parametrize(
    ("lines", "date"),
    [
        ([result("a"), result("b")], "2026-11-22 (b2)"),
        ([result("a")], ""),
        ([result("a"), result("b", "skipped")], ""),
        ([result("a"), result("b", commit="c3")], ""),
        ([result("a"), result("b", suite="sid")], ""),
        ([result("a"), result("b", "skipped"), result("b", suite="sid")], "2026-11-22 (b2)"),
        ([result("a"), result("b", "skipped"), result("b", "failed", suite="sid")], ""),
        ([result("a"), result("b", "failed"), result("b")], ""),
        ([result("a"), {**result("b"), "changed": True}], ""),
        ([result("a"), result("b"), result("a", "failed", "c3")], "2026-11-22 (b2)"),
        (
            [result(variant, commit=commit) for commit in ("b2", "a1") for variant in "ab"],
            "2026-11-22 (a1)",
        ),
    ],
)
def test_a_row_is_seen_where_each_variant_passed_and_none_failed(
    lines: list[Line], date: str
) -> None:
    store = Store(None)
    tests = [f"{GO}[a]", f"{GO}[b]"]
    store.rewrite([{"row": bad_days.SELECTION, "commit": "c3", "tests": tests}, *lines])
    assert bad_days.last_seen(store).get(GO, "") == date


def test_the_line_that_lists_the_variants_is_that_of_the_soak() -> None:
    assert suites.ROWS.row == bad_days.SELECTION


def test_the_page_is_up_to_date() -> None:
    assert bad_days.PAGE.read_text() == bad_days.page(), "python tests/unit/repository/bad_days.py"


def test_each_row_has_one_promise() -> None:
    rows = bad_days.rows()
    assert len(rows) > 20
    assert all(row.promise and row.tests for row in rows)


def test_each_test_that_a_page_names_is_there() -> None:
    """Pages name tests as the source of a fact: ``slurm/test_x.py::test_y``."""
    tests = Path(__file__).parents[2]
    for page in (tests.parent / "docs").glob("*.md"):
        named = re.findall(r"`((?:unit|slurm|cli|ddp)/[\w/]+\.py)(?:::(\w+))?", page.read_text())
        for path, name in named:
            assert (tests / path).exists(), f"{page.name}: {path}"
            text = (tests / path).read_text()
            assert not name or f"def {name}" in text, f"{page.name}: {path}::{name}"
