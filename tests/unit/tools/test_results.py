"""The pytest plugin that keeps results looks at the commit before and after the tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import results
from tools.store import Store, ToolError


class Reporter:
    def __init__(self) -> None:
        self.text = ""

    def section(self, title: str, **_: Any) -> None:
        self.text += f"{title}\n"

    line = section


def finish(path: Path, exit_status: int = 0) -> tuple[int, str]:
    """Run one test at commit b2, and end the session; return its exit status and what it says."""
    plugin = results.Results(Store(path), "b2")
    for when in ("setup", "call", "teardown"):
        report: Any = SimpleNamespace(
            **{"nodeid": "tests/unit/test_a.py::test_a", "when": when, "duration": 1.0},
            **{"failed": False, "skipped": False, "user_properties": []},
        )
        plugin.pytest_runtest_logreport(report)
    session: Any = SimpleNamespace(exitstatus=exit_status)
    plugin.pytest_sessionfinish(session)
    reporter = Reporter()
    plugin.pytest_terminal_summary(reporter)
    return int(session.exitstatus), reporter.text


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a result of an earlier session, in a clean tree at commit b2."""
    monkeypatch.setattr(results, "require_clean_tree", lambda: None)
    monkeypatch.setattr(results, "current_commit", lambda: "b2")
    Store(tmp_path / "x.jsonl").append({"row": "earlier", "commit": "b2"})
    return tmp_path / "x.jsonl"


def test_results_of_an_unchanged_tree_belong_to_its_commit(path: Path) -> None:
    assert finish(path) == (0, "")
    assert [line["commit"] for line in Store(path).lines()] == ["b2", "b2"]


@pytest.mark.parametrize("why", ["the commit is c3 now", "2 files have uncommitted changes"])
def test_results_of_a_tree_that_changed_count_as_of_no_commit(
    path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def refuse() -> None:
        raise ToolError(why)

    if "c3" in why:
        monkeypatch.setattr(results, "current_commit", lambda: "c3")
    else:
        monkeypatch.setattr(results, "require_clean_tree", refuse)
    code, text = finish(path)
    assert (code, "1 results began at commit b2" in text, why in text) == (1, True, True)
    earlier, line = Store(path).lines()
    assert (earlier["commit"], "changed" in earlier) == ("b2", False)
    assert (line["commit"], line["changed"], line["outcome"]) == ("b2-changed", True, "passed")
    assert results.Results(Store(path), "b2").passed() == set()
