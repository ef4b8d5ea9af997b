"""The table in docs/bad-days.md, from the tests' markers and the results that are kept.

    python tests/unit/repository/bad_days.py        writes it anew

A test says ``@pytest.mark.row("name of the bad day", promise="what is promised")``; of several
tests with the same name, one has the promise.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.results import OWN
from tools.store import Store

REPO = Path(__file__).parents[3]
PAGE = REPO / "docs" / "bad-days.md"
RESULTS = REPO / "docs" / "results" / "tests.jsonl"
SELECTION = "selection rows"  # the line of `make soak` that lists all variants of these tests
BEGIN, END = "<!-- table: python tests/unit/repository/bad_days.py -->\n", "<!-- end -->\n"


@dataclass
class Row:
    name: str
    promise: str
    tests: list[str] = field(default_factory=list)  # file::function


def rows() -> list[Row]:
    """Return the rows in the order of the test files."""
    rows_by_name: dict[str, Row] = {}
    for path in sorted((REPO / "tests").rglob("test_*.py")):
        for function, name, promise in _marked(path):
            row = rows_by_name.setdefault(name, Row(name, promise))
            row.promise = row.promise or promise
            row.tests.append(f"{path.relative_to(REPO)}::{function}")
    return list(rows_by_name.values())


def _marked(path: Path) -> Iterator[tuple[str, str, str]]:
    for node in ast.parse(path.read_text()).body:
        for call in getattr(node, "decorator_list", ()):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.row":
                words = [*call.args, *(word.value for word in call.keywords)]
                name, *promise = map(ast.literal_eval, words)
                yield getattr(node, "name", ""), name, "".join(promise)


def last_seen(store: Store) -> dict[str, str]:
    """Return for each test the date and commit at which all its variants passed, and none failed,
    with the machine's Slurm; a variant that is skipped there has to pass with another version.

    The newest `make soak` has listed the variants.
    """
    variants: dict[str, set[str]] = {}
    for test in store.newest().get(SELECTION, {}).get("tests", ()):
        variants.setdefault(_function(test), set()).add(test)
    passed: dict[tuple[str, str], dict[str, str]] = {}  # the date of each variant
    failures: set[tuple[str, str]] = set()
    lines = [line for line in store.lines() if "suite" in line and not line.get("changed")]
    of_own = [line for line in lines if line["suite"] == OWN]
    skipped = {(line["commit"], line["test"]) for line in of_own if line["outcome"] == "skipped"}
    others = [line for line in lines if (line["commit"], line["test"]) in skipped]
    for line in [*of_own, *others]:
        key = _function(line["test"]), line["commit"]
        if line["outcome"] == "passed":
            passed.setdefault(key, {})[line["test"]] = line["date"]
        elif line["outcome"] == "failed":
            failures.add(key)
    dates_seen: dict[str, str] = {}
    for (function, commit), dates in passed.items():  # the later of two commits of a day comes last
        wanted = variants.get(function)
        if wanted and wanted <= dates.keys() and (function, commit) not in failures:
            date = max(dates.values())
            if date >= dates_seen.get(function, "")[: len(date)]:
                dates_seen[function] = f"{date} ({commit})"
    return dates_seen


def _function(test: str) -> str:
    return test.partition("[")[0]


def table() -> str:
    dates_seen = last_seen(Store(RESULTS))
    lines = ["| bad day | what is promised | shown by | last seen |", "|---|---|---|---|"]
    for row in rows():
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.tests)
        # A row was seen when the oldest of its tests was, and not before each of them has been.
        dates = sorted(dates_seen.get(test, "") for test in row.tests)
        lines.append(f"| {row.name} | {row.promise} | {tests} | {dates[0] or 'not yet'} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/bad-days.md as it should be."""
    before, _, after = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{after.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
