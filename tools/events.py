"""A pytest plugin that writes to a file what happens: ``-p tools.events --events FILE``.

Lines of JSON: ``{"collected": [ids]}``, ``{"start": id}``, and
``{"test": id, "outcome", "seconds", "why"}`` when a test is through, set-up and tear-down included.
With pytest-xdist the controller writes them. Beside the file, ``current`` names the test that runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.outcomes import Outcomes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--events", type=Path, help="write a line for each test as it starts and ends")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--events"):
        config.pluginmanager.register(Events(path, is_worker=hasattr(config, "workerinput")))


class Events:
    def __init__(self, path: Path, is_worker: bool) -> None:
        self._path = path
        self._is_worker = is_worker
        self._outcomes = Outcomes()

    def _write(self, **event: Any) -> None:
        with open(self._path, "a") as file:
            file.write(f"{json.dumps(event)}\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not self._is_worker and session.items:
            self._write(collected=[item.nodeid for item in session.items])

    # Called in the process that runs the test, and with pytest-xdist in the controller as well.
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        (self._path.parent / "current").write_text(nodeid)
        if not self._is_worker:
            self._write(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._is_worker and (outcome := self._outcomes.add(report)):
            self._write(
                test=report.nodeid,
                outcome=outcome.outcome,
                seconds=round(outcome.seconds, 2),
                why=outcome.why,
            )
