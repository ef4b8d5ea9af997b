"""A pytest plugin that writes to a file what happens: ``-p tools.events --events FILE``.

Lines of JSON: ``{"collected": [ids]}``, ``{"start": id}``, and
``{"test": id, "outcome", "seconds", "why"}`` when a test is through, set-up and tear-down included.
With pytest-xdist the controller writes them (but for the collection, of which it knows nothing).
Beside the file, ``current*`` name the tests that run. ``--done FILE`` leaves out the tests that
the file names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.outcomes import Outcomes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--events", type=Path, help="write a line for each test as it starts and ends")
    parser.addoption("--done", type=Path, help="leave out the tests that this file names")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--events"):
        config.pluginmanager.register(Events(path, config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if path := config.getoption("--done"):
        deselect(config, items, set(path.read_text().splitlines()))


def deselect(config: pytest.Config, items: list[pytest.Item], tests: set[str]) -> None:
    """Leave out the tests whose ids are in `tests`, and report them to pytest."""
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in tests])
    items[:] = [item for item in items if item.nodeid not in tests]


class Events:
    def __init__(self, path: Path, config: pytest.Config) -> None:
        self._path = path
        worker = getattr(config, "workerinput", {}).get("workerid", "")
        is_controller = not worker and config.getoption("dist", "no") != "no"
        self._writes = not worker
        # The process that runs tests names them.
        self._current = None if is_controller else path.parent / f"current{worker}"
        self._outcomes = Outcomes()

    def _write(self, **event: Any) -> None:
        if self._writes:
            with open(self._path, "a") as file:
                file.write(f"{json.dumps(event)}\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._current:
            self._current.write_text(f"{nodeid}\n")
        self._write(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if outcome := self._outcomes.add(report):
            self._write(
                test=report.nodeid,
                outcome=outcome.outcome,
                seconds=round(outcome.seconds, 2),
                why=outcome.why,
            )
