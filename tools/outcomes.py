"""How a test has ended, from pytest's reports of its set-up, call and tear-down."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

WHY_CHARACTERS = 200


@dataclass
class Outcome:
    outcome: str = "passed"  # or skipped, failed
    seconds: float = 0.0
    why: str = ""  # the assertion or the first line of the failure, or the reason of the skip


class Outcomes:
    """Joins the reports of each test into one outcome."""

    def __init__(self) -> None:
        self._open: dict[str, Outcome] = {}

    def add(self, report: pytest.TestReport) -> Outcome | None:
        """Note a report. With the last report of a test return its outcome, else None."""
        outcome = self._open.setdefault(report.nodeid, Outcome())
        outcome.seconds += report.duration
        if report.failed and outcome.outcome != "failed":
            outcome.outcome, outcome.why = "failed", _reason_of(report)
        elif report.skipped and outcome.outcome == "passed":
            outcome.outcome, outcome.why = "skipped", _reason_of(report)
        if report.when in ("setup", "call"):
            return None  # else it is "teardown", or "???" where pytest-xdist has lost the process
        return self._open.pop(report.nodeid)


def _reason_of(report: pytest.TestReport) -> str:
    """Return why a test has failed or was skipped, in one line. An assertion's own text, often a
    job's whole output, comes before what was compared, which says more."""
    text = report.longrepr
    if isinstance(text, tuple):
        text = text[2].removeprefix("Skipped: ")
    elif crash := getattr(text, "reprcrash", None):
        text = crash.message
    lines = str(text).strip().splitlines() or [""]
    return next((line for line in lines if line.startswith("assert ")), lines[0])[:WHY_CHARACTERS]
