"""The store of the developers' tools: a kill costs a line at most, and the newest result counts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.store import Store, ToolError, completeness, current_commit, require_clean_tree


def line(row: str, commit: str = "a1", **values: object) -> dict[str, object]:
    return {"row": row, "commit": commit, **values}


def test_results_outlive_the_process(tmp_path: Path) -> None:
    store = Store(tmp_path / "results" / "x.jsonl")
    store.append(line("one", outcome="failed"))
    store.append(line("two", outcome="passed"))
    store.append(line("one", outcome="passed"))
    again = Store(tmp_path / "results" / "x.jsonl")
    assert [row["row"] for row in again.lines()] == ["one", "two", "one"]
    assert again.newest()["one"]["outcome"] == "passed"


def test_a_line_cut_short_by_a_kill_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    Store(path).append(line("one"))
    with open(path, "a") as file:
        file.write('{"row": "two", "com')
    store = Store(path)
    assert list(store.newest()) == ["one"]
    store.append(line("three"))
    assert list(Store(path).newest()) == ["one", "three"]


def test_without_a_path_nothing_is_kept() -> None:
    store = Store(None)
    store.append(line("one"))
    store.retain(lambda row: True)
    assert list(store.newest()) == ["one"]


def test_only_the_newest_results_that_are_wanted_are_retained(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.jsonl")
    for commit, row in (("a1", "one"), ("b2", "one"), ("a1", "two"), ("b2", "three")):
        store.append(line(row, commit))
    store.retain(lambda row: row["row"] != "three")
    assert Store(tmp_path / "x.jsonl").lines() == [line("one", "b2"), line("two", "a1")]


@pytest.mark.parametrize(
    ("wanted", "text", "is_whole"),
    [
        ("one two", "2 of 2 rows, all of commit b2", True),
        ("one two three", "2 of 3 rows at commit b2; 1 of an older commit", False),
        ("one four", "1 of 2 rows at commit b2; missing: four", False),
        ("1 2 3 4 5 6 7", "0 of 7 rows at commit b2; missing: 1, 2, 3, 4, 5 and 2 more", False),
        ("", "0 of 0 rows at commit b2", False),
    ],
)
def test_completeness_names_missing_and_older_results(
    wanted: str, text: str, is_whole: bool
) -> None:
    results = {row: line(row, commit) for row, commit in (("one", "b2"), ("two", "b2"))}
    results["three"] = line("three", "a1")
    state = completeness(wanted.split(), results, "b2")
    assert (str(state), state.is_whole) == (text, is_whole)


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_a_commit_of_docs_leaves_results_valid(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    commits = []
    for name in ("hpc_ddp", "docs", "tools"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("1")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", name)
        commits.append(current_commit(tmp_path))
    assert commits[0] == commits[1] != commits[2]
    assert len(commits[0]) == 12
    (tmp_path / "docs" / "a").write_text("2")
    require_clean_tree(tmp_path)
    (tmp_path / "hpc_ddp" / "b").write_text("2")
    with pytest.raises(ToolError, match=r"1 files.*\(hpc_ddp/b"):
        require_clean_tree(tmp_path)
