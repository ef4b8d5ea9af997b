"""Mutants are tried again with more tests, and listed in the report."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tools import mutants
from tools.mutations import Mutation
from tools.store import Line, Store

MUTATION = Mutation("hpc_ddp/slurm.py", 3, "constant", "1", "2", 0, 1, text="pause(1)")
DRAW = mutants.Draw("slurm", 7, [MUTATION])


def result(outcome: str, by: str, **values: Any) -> Line:
    line: Line = {"row": DRAW.row(0), "commit": "b2", "outcome": outcome, "by": by, "run": 6}
    return {**line, "reaching": 9, "text": MUTATION.text, "change": MUTATION.change, **values}


def report(line: Line, slurm_tests: int = 6) -> tuple[bool, list[str]]:
    store = Store(None)
    lines: list[str] = []
    store.append(line)
    is_whole = mutants.report([DRAW], store, "b2", slurm_tests, lines.append)
    return is_whole, lines[3:]


class Examination:
    def __init__(self, _: Any, slurm_tests: int, seconds: float) -> None:
        self.slurm_tests = slurm_tests

    def examine(self, *_: Any) -> mutants.Verdict:
        return mutants.Verdict("killed", "tests/slurm/test_a.py::test_a: no", 12, 12)


@pytest.mark.parametrize(
    ("line", "slurm_tests", "runs"),
    [
        (result("survived", "", slurm=6), 12, True),
        (result("survived", ""), 6, True),
        (result("survived", "", slurm=12), 12, False),
        (result("killed", "types: no", slurm=6), 12, False),
    ],
)
def test_a_survivor_of_fewer_slurm_tests_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, line: Line, slurm_tests: int, runs: bool
) -> None:
    monkeypatch.setattr(mutants, "WorkingCopy", lambda *_, **__: None)
    monkeypatch.setattr(mutants, "Examination", Examination)
    monkeypatch.setattr(mutants.Map, "complete", lambda *_: None)
    store = Store(None)
    store.append(line)
    assert report(line, slurm_tests)[0] is not runs
    args = argparse.Namespace(slurm=slurm_tests, seconds=1.0, dirty=False)
    mutants.run([DRAW], store, "b2", args)
    assert len(store.lines()) == 1 + runs
    if runs:
        assert store.lines()[1]["slurm"] == slurm_tests


@pytest.mark.parametrize(
    ("by", "is_listed"),
    [
        ("pytest ended with 2: ERROR tests/unit/test_a.py", True),
        ("time limit, in tests/unit/test_a.py::test_a", True),
        ("tests/unit/test_a.py::test_a: assert 1 == 2", False),
        ("types: hpc_ddp/slurm.py: error: no", False),
    ],
)
def test_mutants_killed_without_a_test_failure_are_listed(by: str, is_listed: bool) -> None:
    is_whole, lines = report(result("killed", by))
    assert is_whole
    expected = [f"look at    {DRAW.row(0)}  {MUTATION}\n    killed: {by}"] if is_listed else []
    assert lines[:-1] == expected
