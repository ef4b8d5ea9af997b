"""A pytest plugin that keeps results: ``--results FILE``, and ``--resume`` to go on.

Each test adds a line to the store as soon as it is through. With ``--resume``, tests that have
passed at this commit are left out. With pytest-xdist the controller keeps the results; it also
decides what is left out, since all workers must have the same tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tools.events import deselect
from tools.outcomes import Outcomes
from tools.store import CACHE, Line, Store, ToolError, current_commit, require_clean_tree

SUITE_VARIABLE = "HPC_DDP_TEST_SLURM"  # names the suite of Debian whose Slurm is used
OWN = "own"  # the machine's
NAME_VARIABLE = "HPC_DDP_TEST_SUITE"  # names a suite that does not differ by its Slurm
PASSED_BEFORE = "passed_before"  # of workerinput
BAD_DAY = "bad day"  # of a test's properties


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="keep a line for each test in this file")
    parser.addoption(
        "--resume", action="store_true", help="leave out what has passed at this commit"
    )


def configure(config: pytest.Config) -> None:
    """Register the plugin, if its option is given."""
    path = config.getoption("--results")
    if path is None:
        if config.getoption("--resume"):
            raise pytest.UsageError("--resume goes with --results FILE")
        return
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Selection(set(config.workerinput[PASSED_BEFORE])))
        return
    try:
        require_clean_tree()
        results = Results(Store(path), current_commit())
    except ToolError as error:
        raise pytest.UsageError(str(error)) from None
    passed = results.passed() if config.getoption("--resume") else set()
    config.pluginmanager.register(Selection(passed))
    config.pluginmanager.register(Handover(passed))
    config.pluginmanager.register(results)


class Selection:
    """Leaves out tests; in each process that collects them."""

    def __init__(self, passed: set[str]) -> None:
        self._passed = passed

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        deselect(config, items, self._passed)
        for item in items:
            if row := item.get_closest_marker("row"):
                item.user_properties.append((BAD_DAY, row.args[0]))


class Handover:
    """Tells the workers of pytest-xdist which tests to leave out."""

    def __init__(self, passed: set[str]) -> None:
        self._passed = sorted(passed)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[PASSED_BEFORE] = self._passed


class Results:
    """Keeps what became of each test."""

    def __init__(self, store: Store, commit: str) -> None:
        self._store = store
        self._commit = commit
        names = (os.environ.get(variable) for variable in (NAME_VARIABLE, SUITE_VARIABLE))
        self._suite = next(filter(None, names), OWN)
        self._versions = {"torch": version("torch")} if NAME_VARIABLE in os.environ else {}
        self._outcomes = Outcomes()
        self._lines: list[Line] = []  # of this session
        self._change = ""

    def passed(self) -> set[str]:
        """Return the tests whose newest result at this commit is a pass."""
        return {
            line["test"]
            for line in newest(self._store.lines(), self._commit).values()
            if line["suite"] == self._suite and line["outcome"] == "passed"
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self._outcomes.add(report)
        if outcome is None:
            return
        properties = dict(report.user_properties)
        line: Line = {
            "row": row_of(self._suite, report.nodeid),
            "commit": self._commit,
            "suite": self._suite,
            "test": report.nodeid,
            "outcome": outcome.outcome,
            "seconds": round(outcome.seconds, 1),
            "date": time.strftime("%Y-%m-%d"),
            **self._versions,
        }
        line |= {"why": outcome.why} if outcome.why else {}
        line |= {"bad_day": properties.pop(BAD_DAY)} if BAD_DAY in properties else {}
        line |= {"measured": properties} if properties else {}
        line |= {"slurm": slurm_version(self._suite)} if "tests/slurm/" in report.nodeid else {}
        self._store.append(line)
        self._lines.append(line)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Look whether the results are of the commit that the session began with."""
        try:
            require_clean_tree()
            commit = current_commit()
            self._change = "" if commit == self._commit else f"the commit is {commit} now"
        except ToolError as error:
            self._change = str(error)
        if self._change:
            self.disown()
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def disown(self) -> None:
        """Let this session's results count as of no commit; none is dropped."""
        for line in self._lines:
            line |= {"commit": f"{self._commit}-changed", "changed": True}
        self._store.rewrite(self._store.lines())

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._change:
            terminalreporter.section("the tree has changed meanwhile", sep="!", red=True)
            terminalreporter.line(
                f"{len(self._lines)} results began at commit {self._commit} and count as of no "
                f"commit: {self._change}"
            )


def row_of(suite: str, test: str) -> str:
    return f"{suite} {test}"


def newest(lines: list[Line], commit: str) -> dict[str, Line]:
    """Return the newest result of each test at a commit."""
    return {line["row"]: line for line in lines if line["commit"] == commit and "test" in line}


def slurm_version(suite: str) -> str:
    """Return the version of Slurm; asked for after a test, which may have installed it."""
    folders = f"{os.environ['PATH']}:/usr/sbin"
    path = folders if suite == OWN else str(CACHE / f"slurm-{suite}" / "bin")
    program = shutil.which("slurmctld", path=path)
    if program is None:
        return "none"
    done = subprocess.run([program, "-V"], capture_output=True, text=True)
    return (done.stdout.split() or ["none"])[-1]
