"""The page of the long tests shows their state."""

from __future__ import annotations

from pathlib import Path

from tools import suites
from tools.store import Line, Store

ONE, TWO, THREE = (f"tests/slurm/test_a.py::test_{name}" for name in ("one", "two", "three"))


def result(test: str, outcome: str = "passed", commit: str = "b2") -> Line:
    line = {"row": f"own {test}", "suite": "own", "test": test, "outcome": outcome}
    return {**line, "commit": commit, "date": "2026-11-22", "slurm": "22.05.8", "why": "x\ny"}


def store_of(tmp_path: Path, *lines: Line, tests: tuple[str, ...] = (ONE, TWO)) -> Store:
    listed = {"row": suites.MORE.row, "commit": "b2", "tests": [*tests]}
    store = Store(tmp_path / "tests.jsonl")
    store.rewrite([listed, *lines])
    return store


def test_the_page_is_up_to_date() -> None:
    command = "make test-more REPORT=1"
    assert suites.PAGE.read_text() == suites.page(Store(suites.STORE)), command


def test_nothing_was_run() -> None:
    assert suites.state_of(suites.MORE, Store(None)).text == "not run yet"


def test_all_have_passed_at_one_commit(tmp_path: Path) -> None:
    state = suites.state_of(suites.MORE, store_of(tmp_path, result(ONE), result(TWO)), "b2")
    assert state.is_good
    assert state.text == "2 of 2 rows, all of commit b2; 2 passed"


def test_failures_missing_rows_and_other_commits_are_reported(tmp_path: Path) -> None:
    lines = (result(ONE, "failed"), result(TWO, commit="a1"))
    store = store_of(tmp_path, *lines, tests=(ONE, TWO, THREE))
    state = suites.state_of(suites.MORE, store, "b2")
    assert not state.is_good
    assert state.text == (
        f"1 of 3 rows at commit b2; 1 of an older commit; missing: own {THREE}; 1 failed, 1 passed"
    )
    assert f"- `{ONE}`, commit b2: `x y`" in suites.page(store)


def test_a_skipped_test_is_named_and_is_no_success(tmp_path: Path) -> None:
    store = store_of(tmp_path, result(ONE, "skipped"), result(TWO))
    lines: list[str] = []
    assert not suites.report([suites.MORE], store, "b2", lines.append)
    assert lines[0].endswith("all of commit b2; 1 passed, 1 skipped")
    assert lines[1] == f"skipped `{ONE}`, commit b2: `x y`"


def test_a_failure_counts_though_the_next_call_passes(tmp_path: Path) -> None:
    failures = (result(ONE, "failed", "a1"), result(ONE, "failed"), result(ONE, "failed"))
    store = store_of(tmp_path, *failures, result(ONE), result(TWO))
    suites.thin_out(store, "b2")
    lines: list[str] = []
    assert not suites.report([suites.MORE], store, "b2", lines.append)
    assert lines[0].endswith("all of commit b2; 1 passed, 1 passed after failures")
    text = f"passed after 2 failures: `{ONE}`, commit b2: `x y`"
    assert lines[1:] == [text]
    assert f"- {text}\n" in suites.page(store)


def test_a_list_of_another_commit_is_incomplete(tmp_path: Path) -> None:
    store = store_of(tmp_path, result(ONE, commit="c3"), result(TWO, commit="c3"))
    state = suites.state_of(suites.MORE, store, "c3")
    assert (state.is_good, "listed at commit b2" in state.text) == (False, True)


def test_the_newest_pass_is_kept_beside_the_newest_result(tmp_path: Path) -> None:
    lines = (result(ONE, commit="a1"), result(ONE), result(ONE, "failed"), result(TWO))
    store = store_of(tmp_path, *lines)
    suites.thin_out(store, "c3")
    outcomes = [(line["row"], line.get("outcome")) for line in Store(store.path).lines()[1:]]
    assert outcomes == [
        (f"own {ONE}", "passed"),
        (f"own {ONE}", "failed"),
        (f"own {TWO}", "passed"),
    ]


def test_a_failure_stays_while_other_variants_of_its_commit_do(tmp_path: Path) -> None:
    lines = [
        *(result(f"{ONE}[a]", "failed", "a1"), result(f"{ONE}[b]", commit="a1")),
        *(result(f"{TWO}[a]", "failed", "a1"), result(f"{ONE}[a]"), result(f"{TWO}[a]")),
    ]
    store = store_of(tmp_path, *lines)
    suites.thin_out(store, "c3")
    assert store.lines()[1:] == [*lines[:2], *lines[3:]]


def test_the_page_shows_measured_values(tmp_path: Path) -> None:
    tests = tuple(f"{ONE}[{name}]" for name in "abc")
    lines = [{**result(test), "measured": {"gone after s": i}} for i, test in enumerate(tests)]
    lines[2]["outcome"] = "failed"
    days = [{**result(TWO), "bad_day": "power is cut", "measured": {"noticed after s": 31}}]
    store = store_of(tmp_path, *lines, *days, tests=(*tests, TWO))
    assert suites.page(store).partition("## Measured\n")[2].splitlines()[:4] == [
        "| bad day or test | what was measured | values | commit |",
        "|---|---|---|---|",
        f"| `{ONE}` | gone after s | 0, 1 | b2 |",
        "| power is cut | noticed after s | 31 | b2 |",
    ]


def test_passes_stay_until_all_variants_have_passed_at_a_newer_commit(tmp_path: Path) -> None:
    old = [result(f"{ONE}[{name}]", commit="a1") for name in "ab"]
    new = [result(f"{ONE}[{name}]", commit="c3") for name in "ab"]
    store = store_of(tmp_path, *old, new[0], {**new[0], "commit": "c3-changed", "changed": True})
    suites.thin_out(store, "c3")
    assert store.lines()[1:4] == [*old, new[0]]
    store.append(new[1])
    suites.thin_out(store, "c3")
    assert [line["commit"] for line in store.lines()[1:]] == ["c3", "c3-changed", "c3"]
