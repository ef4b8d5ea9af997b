from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.core.journal.journal import Journal, read_events
from hpc_ddp.training.checkpoint.schedule import (
    SaveSchedule,
    between_failures,
    slowest_save,
)
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.run import Run
from hpc_ddp.training.stops.consensus import (
    Decision,
    StopConsensus,
    next_period,
)
from hpc_ddp.training.stops.signals import CANCELLED, DEADLINE, NONE, NOTICE, Notices
from hpc_ddp.training.telemetry import metrics as metrics_module
from hpc_ddp.training.telemetry.metrics import Metrics
from tests.raw_events import typed
from tests.waiting import LIMIT_S
from unit.training.fakes import Alone, Saves


def make_schedule(saves: Saves | None = None, **options: Any) -> SaveSchedule:
    return SaveSchedule(saves or Saves(), 0, **options)  # type: ignore[arg-type]  # a stand-in


def make_pace(notices: Notices, end_time: float | None = None, **options: Any) -> StopConsensus:
    schedule = make_schedule(**options)
    notices.end_time = end_time
    return StopConsensus(Alone(), notices, schedule)  # type: ignore[arg-type]  # a stand-in


@given(st.integers(1, 10**6), st.integers(0, 10**8))
def test_the_period_is_a_fifth_of_a_second_and_grows_slowly(current: int, step_us: int) -> None:
    period = next_period(current, step_us)
    assert 1 <= period <= 2 * current
    assert period == 1 or period * step_us <= 200_000


def test_short_steps_exchange_rarely_and_slow_ones_each_time() -> None:
    period = 1
    for _ in range(20):
        period = next_period(period, 1000)
    assert period == 200
    assert next_period(period, 500_000) == 1


def test_a_notice_is_acted_on_at_the_next_exchange() -> None:
    notices = Notices(None)
    pace = make_pace(notices)
    assert pace.step_done(1) == Decision()
    notices.reason = NOTICE
    decisions = [pace.step_done(step).reason for step in range(2, 12)]
    assert NOTICE in decisions
    assert decisions[0] == NONE
    assert pace.decide_now().reason == NOTICE


def test_the_deadline_leaves_time_for_a_save() -> None:
    for save_s, left_s, reason in ((1, 60, NONE), (60, 60, DEADLINE), (1, 3, DEADLINE)):
        saves = Saves()
        saves.slowest_save_s = save_s
        pace = make_pace(Notices(None), end_time=time.time() + left_s, saves=saves)
        pace._started_at -= 1000
        assert pace.decide_now().reason == reason


def test_saves_are_due_by_steps_and_by_time() -> None:
    pace = make_pace(Notices(None), every_steps=3)
    assert [pace.step_done(step).save for step in range(1, 7)] == [False, False, True] * 2
    pace = make_pace(Notices(None), every=0.0)
    due = [pace.step_done(step).save for step in range(1, 4)]
    assert True in due
    assert due != [True] * 3  # not again before the save has been made
    assert not make_pace(Notices(None), every=1000.0).decide_now().save


def test_a_clock_waits_for_the_save_under_way_and_retries_a_failed_one_soon() -> None:
    saves = Saves()
    schedule = make_schedule(saves, every=0.0)
    assert schedule.is_due()
    saves.in_flight = True
    assert not schedule.is_due()
    saves.slowest_save_s = 7.0
    assert schedule.save_s() == 14.0
    saves.in_flight, saves.failed = False, True
    schedule = make_schedule(saves, every=1000.0)
    assert not schedule.is_due()
    schedule._last -= 31
    assert schedule.is_due()


def test_auto_is_young_and_daly_from_what_was_measured(capsys: Any) -> None:
    history: list[JournalEvent] = []
    for attempt, end in enumerate(("failed", "stopped", "verdict")):  # two that lost something
        for event, at in (("first_step", 0), ("checkpoint", 10), (end, 28_800)):
            more = {"write_s": 3.0} if event == "checkpoint" else {}
            history.append(typed(event, 1e9 + at, attempt, **more))
    assert between_failures(history) == 2 * 86_400 / 3
    saves = Saves()
    schedule = make_schedule(
        saves,
        every="auto",
        slowest_save_s=slowest_save(history),
        failure_interval_s=between_failures(history),
    )
    assert schedule.save_s() == 3.0
    assert not schedule.is_due()
    saves.slowest_save_s, saves.stall_s = 1.0, 0.5
    for _ in range(2):
        schedule.saved()
    assert schedule._every == pytest.approx(240)
    assert capsys.readouterr().err == (
        "hpc-ddp: saving every 240 s: a save holds the training up for 0.500 s, and a failure is"
        " expected every 16.0 h; together 0.42 % of the time\n"
    )


@pytest.mark.parametrize(
    ("content", "source"), [('{"source": "USR2"}', "USR2"), ("preemption\n", "preemption")]
)
def test_a_notice_file_names_its_source(tmp_path: Path, content: str, source: str) -> None:
    path = tmp_path / "notice"
    notices = Notices(path)
    cancelled = tmp_path / "cancelled"
    notices.watch_for_cancel(cancelled)
    path.touch()  # empty: no word yet
    notices._look()
    assert notices.reason == NONE
    cancelled.touch()
    notices._look()
    assert (notices.reason, notices.source) == (CANCELLED, "cancelled")
    path.write_text(content)
    notices._look()
    assert (notices.reason, notices.source) == (NOTICE, source)


def test_a_limit_that_is_extended_is_used(tmp_path: Path) -> None:
    path = tmp_path / "end-time"
    path.touch()  # empty: Slurm has the same time still
    now = time.time()
    notices = Notices(None)
    pace = make_pace(notices)
    notices.watch_end_time(now + 5, path)
    assert pace._reason() == DEADLINE
    path.write_text(f"{now + 3600:.0f}")
    notices._look()
    assert pace._reason() == NONE
    path.write_text(f"{now + 1:.0f}")
    notices._look()
    assert pace._reason() == DEADLINE


def test_metrics_are_written_rarely_and_at_the_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "rank-0")
    metrics = Metrics(journal, 2, ["a", "b"])
    for step in range(1, 100):
        loss = torch.tensor(float(step))
        metrics.add(Position(step=step), 16, {"loss": loss})
    metrics.flush()
    metrics.flush()
    journal.drain(LIMIT_S)
    first, *events = [event.to_line() for event in read_events(tmp_path)]
    assert (first["event"], first["step"], first["hosts"]) == ("first_step", 1, ["a", "b"])
    assert 1 <= len(events) <= 2
    assert (events[-1]["step"], events[-1]["loss"]) == (99, 99.0)
    assert "total_steps" not in events[-1]


def test_a_line_of_metrics_is_left_to_the_journals_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_module, "EVERY_S", 0.0)
    calls: list[tuple[str, str, int]] = []
    journal: Any = SimpleNamespace(
        write=lambda event: calls.append(("now", event.event, event.to_fields()["step"])),
        write_later=lambda event: calls.append(("later", event.event, event.to_fields()["step"])),
    )
    metrics = Metrics(journal, 1, ["a"])
    for step in (1, 2):
        metrics.add(Position(step=step), 4, {"loss": torch.tensor(1.0)})
    metrics.flush()
    assert calls == [("now", "first_step", 1), ("later", "metrics", 1), ("later", "metrics", 2)]


def test_the_weights_are_read_an_exchange_after_a_look() -> None:
    calls: list[tuple[int, str]] = []
    run: Any = SimpleNamespace(_look_at=0, _look_answers_at=None)
    for exchanges in (0, 0, 1, 1, 9, 10, 10, 12, 13):
        precision = SimpleNamespace(look=lambda at=exchanges: calls.append((at, "look")))
        run._precision = precision
        run._refuse_non_finite = lambda at=exchanges: calls.append((at, "read"))
        Run._watch_weights(run, exchanges)
    assert calls == [(0, "look"), (1, "read"), (10, "look"), (12, "read")]


def test_a_save_that_is_due_is_heard_of_where_all_wait() -> None:
    now = make_pace(Notices(None), every=0.0)
    assert now.decide_now().save  # sent, and read at once
    before = make_pace(Notices(None), every=0.0)
    before._exchange()
    assert before.decide_now().save  # sent at the last exchange
