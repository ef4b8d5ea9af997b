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
        "2 tests, 3 runs each, 1 of them failed, 0 were skipped;"
        f" 1 of 2 rows at commit b2; missing: {DDP}"
    )


def test_a_complete_table_is_a_success() -> None:
    table = table_of(None, count=2)
    for test, loaded in ((DDP, True), (DDP, False), (UNIT, False), (UNIT, False)):
        table.add(test, "passed", "", loaded=loaded)
    lines: list[str] = []
    assert flakes.report(table, lines.append)
    assert lines[-1].endswith("2 of 2 rows, all of commit b2")


def test_skipped_runs_are_named_and_are_no_success() -> None:
    table = table_of(None, count=2)
    for test, loaded in ((DDP, True), (DDP, False), (UNIT, False)):
        table.add(test, "passed", "", loaded=loaded)
    table.add(UNIT, "skipped", "no Slurm", loaded=False)
    assert table.missing(loaded=False) == []
    lines: list[str] = []
    assert not flakes.report(table, lines.append)
    assert lines[0] == f"{UNIT}: skipped 1 of 2 times"
    assert "0 of them failed, 1 were skipped; 2 of 2 rows" in lines[1]


def test_results_of_an_older_commit_are_counted_until_the_test_has_run_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "flakes.jsonl"
    old = table_of(path, commit="a1", count=1)
    for test in (UNIT, DDP, "tests/unit/test_gone.py::test_gone"):
        old.add(test, "passed", "", loaded=False)
    lines: list[str] = []
    table = flakes.Table(Store(path), "b2", "", 1)
    assert not flakes.report(table, lines.append)
    assert lines[0].endswith(
        "0 of 2 rows at commit b2; 2 of an older commit; the tests were listed at commit a1"
    )
    table.list_tests([UNIT, DDP])
    table.drop_unlisted()
    assert list(table.store.newest()) == [UNIT, DDP, table.row]
    table.add(UNIT, "passed", "", loaded=False)
    assert not flakes.report(table, lines.append)
    assert lines[1].endswith("1 of 2 rows at commit b2; 1 of an older commit")


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
