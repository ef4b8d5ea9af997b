"""How many failures a run survives: since its newest checkpoint, and in a row."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.events import JournalEvent
from unit.node.outcome.fakes import decide_by, event_of, failed_records

KILLED = {"error": "", "code": -9}


def _past(*ends: str, error: str = "") -> list[JournalEvent]:
    """Return the events of an attempt for each word of `ends`: its cause, ``saved`` before it where
    it has saved a checkpoint."""
    events: list[JournalEvent] = []
    for attempt, end in enumerate(ends):
        cause, has_saved, step = end.removeprefix("saved "), "saved" in end, 100 * attempt + 50
        events.append(event_of("first_step", attempt, step=step - 49))
        if has_saved:
            events.append(event_of("checkpoint", attempt, step=step))
        values: dict[str, Any] = {"cause": cause, "progress": has_saved, "step": step}
        events.append(event_of("verdict", attempt, **values, error=error))
    return events


def _judge(past: list[JournalEvent], has_saved: bool, **failure: Any) -> str:
    """Return the reason for which a failure after `past` ends the run, '' where it does not."""
    attempt = sum(event.event == "verdict" for event in past)
    step = 100 * attempt + 70
    events = [*past, event_of("first_step", attempt, step=step - 9)]
    if has_saved:
        events.append(event_of("checkpoint", attempt, step=step))
    verdict = decide_by(attempt=attempt, events=events, records=failed_records(**failure))
    return verdict.refusal.text if verdict.refusal else ""


@pytest.mark.parametrize("count", [1, 4, 8])
def test_failures_far_apart_do_not_end_a_run_that_saves(count: int) -> None:
    assert _judge(_past(*["saved failed"] * count), True, **KILLED) == ""


def test_failures_for_ever_are_bounded_though_each_comes_after_a_newer_checkpoint() -> None:
    past = _past(*["saved failed"] * 9)
    assert "10 attempts in a row have failed, though with newer" in _judge(past, True, **KILLED)
    other = _past("saved failed", "saved time limit", *["saved failed"] * 8)
    assert _judge(other, True, **KILLED) == ""


def test_failures_since_the_newest_checkpoint_are_counted() -> None:
    """Before a first step they may be as many as --max-failures."""
    past = _past("failed", "failed", "saved failed")
    for attempt in (3, 4, 5):
        verdict = decide_by(attempt=attempt, events=past, records=failed_records(**KILLED))
        assert verdict.refusal is None or attempt == 5
        past.append(event_of("verdict", attempt, cause="failed", error="", progress=False))
    assert verdict.refusal
    assert verdict.refusal.text == "3 retries were made already (--max-failures)"


@pytest.mark.parametrize(("count", "is_over"), [(2, False), (3, True)])
def test_an_error_that_comes_after_each_checkpoint_ends_the_run(count: int, is_over: bool) -> None:
    """As of a script whose validation fails in each epoch, behind the save: GPU hours are lost."""
    error = "ValueError: boom"
    past = _past(*["saved failed"] * count, error=error)
    reason = "the same error came in 4 attempts in a row (--max-failures)"
    assert _judge(past, True, error=error) == (reason if is_over else "")
    assert _judge(past, True, error="OSError: other") == ""
    assert (
        _judge(_past("failed", *["saved preempted"] * count, error=error), True, error=error) == ""
    )


def test_a_time_limit_ends_the_row_of_a_script_whose_checkpoints_are_not_seen() -> None:
    def judge(*causes: str) -> str:
        past = [
            event_of("verdict", k, cause=cause, progress=False, error="")
            for k, cause in enumerate(causes)
        ]
        records = failed_records(**KILLED)
        verdict = decide_by(attempt=len(past), events=past, records=records)
        return verdict.refusal.text if verdict.refusal else ""

    assert judge("failed", "failed", "failed")
    assert judge("failed", "preempted", "failed", "failed")
    assert judge("failed", "failed", "time limit", "failed") == ""


def test_without_retries_the_first_failure_ends_the_run() -> None:
    events = _past("saved failed")[:2]
    spec = JobSpec("t.py", max_failures=0)
    verdict = decide_by(spec=spec, events=events, records=failed_records(**KILLED))
    assert verdict.refusal
    assert verdict.refusal.text == "0 retries were made already (--max-failures)"
