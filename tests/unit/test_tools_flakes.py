"""The counts of the flakes tool."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import flakes
from tools.store import Store

UNIT, DDP = "tests/unit/test_a.py::test_a", "tests/ddp/test_b.py::test_b"


def table_of(path: Path | None, commit: str = "b2", count: int = 3) -> flakes.Table:
    table = flakes.Table(Store(path), commit, "", count)
    table.list_tests([UNIT, DDP])
    return table


def test_runs_are_counted_and_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "flakes.jsonl"
    table_of(path).add(DDP, "failed", "it was late", loaded=True)
    table_of(path).add(DDP, "passed", "", loaded=False)
    counts = table_of(path).counts(DDP)
    assert counts == flakes.Counts(passed=1, failed_under_load=1, why="it was late")
    assert table_of(path, commit="c3").counts(DDP) == flakes.Counts()


def test_only_tests_that_start_processes_run_under_load() -> None:
    table = table_of(None)
    assert (table.missing(loaded=False), table.missing(loaded=True)) == ([UNIT, DDP], [DDP])
    for test, loaded in ((DDP, True), (DDP, False), (DDP, False), (UNIT, False)):
        table.add(test, "passed", "", loaded=loaded)
    assert (table.missing(loaded=False), table.missing(loaded=True)) == ([UNIT], [])


def test_the_report_names_what_failed_and_what_is_missing() -> None:
    table = table_of(None)
    for number in range(3):
        table.add(UNIT, "failed" if number == 1 else "passed", "it was late", loaded=False)
    lines: list[str] = []
    assert not flakes.report(table, lines.append)
    assert lines[0] == f"{UNIT}: failed 1 of 3 times, under load 0 of 0\n    it was late"
    assert lines[1] == (
        f"2 tests, 3 runs each, 1 of them failed; 1 of 2 rows at commit b2; missing: {DDP}"
    )


def test_a_table_that_is_whole() -> None:
    table = table_of(None, count=2)
    for test, loaded in ((DDP, True), (DDP, False), (UNIT, False), (UNIT, False)):
        table.add(test, "passed", "", loaded=loaded)
    lines: list[str] = []
    assert flakes.report(table, lines.append)
    assert lines[-1].endswith("2 of 2 rows, all of commit b2")


def test_the_file_does_not_grow_with_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flakes, "REWRITE_EVERY", 5)
    path = tmp_path / "flakes.jsonl"
    table = table_of(path)
    for _ in range(30):
        table.add(UNIT, "passed", "", loaded=False)
    assert len(path.read_text().splitlines()) <= 8
    assert table_of(path).counts(UNIT).passed == 30
