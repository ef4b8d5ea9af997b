"""The ranks exchange notices, deadlines and due saves, and stop at the same step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.training import devices
from hpc_ddp.training.stops.consensus import Decision, StopConsensus, next_period
from hpc_ddp.training.stops.signals import CANCELLED, DEADLINE, NONE, NOTICE, Notices
from unit.fakes import Clock
from unit.training.fakes import Alone, Saves, make_schedule


def make_consensus(
    notices: Notices, end_time: float | None = None, **options: Any
) -> StopConsensus:
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
    pace = make_consensus(notices)
    assert pace.note_step(1) == Decision()
    notices.reason = NOTICE
    decisions = [pace.note_step(step).reason for step in range(2, 12)]
    assert NOTICE in decisions
    assert decisions[0] == NONE
    assert pace.decide_now().reason == NOTICE


def test_the_deadline_leaves_time_for_a_save() -> None:
    for save_s, left_s, reason in ((1, 60, NONE), (60, 60, DEADLINE), (1, 3, DEADLINE)):
        saves = Saves()
        saves.slowest_save_s = save_s
        pace = make_consensus(Notices(None), end_time=time.time() + left_s, saves=saves)
        pace._started_at -= 1000
        assert pace.decide_now().reason == reason


def test_saves_are_due_by_steps_and_by_time() -> None:
    pace = make_consensus(Notices(None), every_steps=3)
    assert [pace.note_step(step).save for step in range(1, 7)] == [False, False, True] * 2
    pace = make_consensus(Notices(None), every=0.0)
    due = [pace.note_step(step).save for step in range(1, 4)]
    assert True in due
    assert due != [True] * 3  # not again before the save has been made
    assert not make_consensus(Notices(None), every=1000.0).decide_now().save


def test_a_device_that_the_process_does_not_use_stays_closed() -> None:
    """As one that is there, where a library trains on the CPU: it may take one process alone."""
    schedule: Any = make_schedule(Saves())
    alone: Any = Alone()
    pace = StopConsensus(alone, Notices(None), schedule, device=torch.device("cuda"))
    assert [pace.decide_now().reason for _ in range(2)] == [NONE, NONE]


@pytest.mark.parametrize("step_s", [0.002, 0.05, 1.5])
def test_the_end_is_met_where_the_device_is_behind_the_host(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """As with graphs of a whole step, which the host only launches."""
    over_at = clock.time()

    class Mark:
        def __init__(self, device: torch.device) -> None:
            self._over_at = over_at

        def query(self) -> bool:
            return clock.time() >= self._over_at

        def synchronize(self) -> None:
            clock.now = max(clock.now, self._over_at)

    monkeypatch.setattr(devices, "mark", Mark)
    monkeypatch.setattr(devices, "is_used", lambda device: True)
    saves, notices, end = Saves(), Notices(None), clock.time() + 100
    saves.slowest_save_s, notices.end_time = 1.0, end
    schedule: Any = make_schedule(saves)
    alone: Any = Alone()
    pace = StopConsensus(alone, notices, schedule, device=torch.device("meta"))
    for step in range(1, 10**6):
        clock.now += 0.0001
        over_at = max(over_at, clock.time()) + step_s
        if pace.note_step(step).reason:
            break
    saved_at = max(over_at, clock.time()) + 1.0
    assert end - 20 < saved_at < end


def test_an_extended_time_limit_is_used(tmp_path: Path) -> None:
    path = tmp_path / "end-time"
    path.touch()  # empty: Slurm has the same time still
    now = time.time()
    notices = Notices(None)
    pace = make_consensus(notices)
    notices.watch_end_time(now + 5, path)
    assert pace._find_reason() == DEADLINE
    path.write_text(f"{now + 3600:.0f}")
    notices._read_files()
    assert pace._find_reason() == NONE
    path.write_text(f"{now + 1:.0f}")
    notices._read_files()
    assert pace._find_reason() == DEADLINE


def test_a_due_save_is_decided_where_all_ranks_wait() -> None:
    now = make_consensus(Notices(None), every=0.0)
    assert now.decide_now().save  # sent, and read at once
    before = make_consensus(Notices(None), every=0.0)
    before._exchange()
    assert before.decide_now().save  # sent at the last exchange


class RecordedTimer:
    """A rank's timer whose calls are recorded."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.wanted = True

    def is_due(self) -> bool:
        return self.wanted

    def report(self) -> None:
        self.calls.append("report")

    def gather(self) -> None:
        self.calls.append("gather")


def make_lone_consensus(
    saves: Saves | None = None, effort: Any = None, **options: Any
) -> StopConsensus:
    alone: Any = Alone()
    return StopConsensus(alone, Notices(None), make_schedule(saves, **options), effort)


def _play_steps(pace: StopConsensus, clock: Clock, seconds: Sequence[float]) -> None:
    for step, duration in enumerate(seconds, start=1):
        clock.now += duration
        pace.note_step(step)


def _reason_with(pace: StopConsensus, clock: Clock, left_s: float) -> int:
    pace._notices.end_time = clock.now + left_s
    return pace._find_reason()


def test_the_deadline_is_counted_from_steps_and_saves(clock: Clock) -> None:
    """A margin, one and a half saves, and the steps of two exchanges and one more."""
    saves = Saves()
    saves.slowest_save_s = 4.0
    pace = make_lone_consensus(saves)
    pace._started_at = clock.now - 1000
    pace._period = 1
    _play_steps(pace, clock, [2.0, 2.0, 2.0])
    pace._period = 1
    need_s = 5.0 + 6.0 + 3 * 2.0
    assert _reason_with(pace, clock, need_s + 0.1) == NONE
    assert _reason_with(pace, clock, need_s) == DEADLINE
    pace._notices.reason = CANCELLED
    assert _reason_with(pace, clock, 0.0) == CANCELLED


@pytest.mark.parametrize(
    ("limit_s", "steps"),
    [
        (480.0, [0.02] * 600 + [12.0] + [0.02] * 50),  # an evaluation inside an epoch
        (1200.0, [0.005] * 500 + [60.0] + [0.005] * 50),
        (600.0, [0.002] * 1000 + [30.0, 0.002]),  # a disk that stalls
        (600.0, [180.0, 0.1, 0.1]),  # torch.compile, in the first step
        (600.0, [0.1] * 50 + [180.0, 0.1, 0.1]),  # and again for another shape
    ],
)
def test_a_pause_is_expected_once(clock: Clock, limit_s: float, steps: list[float]) -> None:
    """A run does not stop for its deadline with more than a tenth of its time left."""
    pace = make_lone_consensus()
    pace._notices.end_time = clock.now + limit_s
    for step, duration in enumerate(steps, start=1):
        clock.now += duration
        assert pace.note_step(step).reason == NONE, step
    quick_s = steps[-1]
    while pace.note_step(0).reason == NONE:
        clock.now += quick_s
    assert 5.0 < pace._notices.end_time - clock.now < limit_s / 10


def test_slow_steps_are_expected_to_stay_slow(clock: Clock) -> None:
    pace = make_lone_consensus()
    _play_steps(pace, clock, [0.1] * 20 + [10.0] * 4)
    pace._period = 1
    assert _reason_with(pace, clock, 5.0 + 7.5 + 30.0) == DEADLINE
    assert _reason_with(pace, clock, 5.0 + 7.5 + 30.1) == NONE


def test_one_slow_save_does_not_end_each_attempt(clock: Clock) -> None:
    """One of 45 s, in an earlier attempt of a job of a minute, ended all later ones at once."""
    pace = make_lone_consensus(slowest_save_s=45.0)
    _play_steps(pace, clock, [0.5, 0.5, 0.5])
    assert _reason_with(pace, clock, 58.5) == NONE
    clock.now += 25.0
    assert _reason_with(pace, clock, 33.5) == NONE


def test_time_is_left_for_one_more_evaluation(clock: Clock) -> None:
    pace = make_lone_consensus()
    pace._started_at = clock.now - 10_000
    _play_steps(pace, clock, [0.0, 0.0])
    clock.now += 40.0
    pace.end_pause()
    pace._period = 1
    assert _reason_with(pace, clock, 5.0 + 7.5 + 40.0) == DEADLINE
    assert _reason_with(pace, clock, 5.0 + 7.5 + 40.1) == NONE


def test_time_before_a_restarted_step_is_not_counted(clock: Clock) -> None:
    planner = make_lone_consensus()
    clock.now += 50.0
    planner.restart_step()
    clock.now += 3.0
    planner.note_step(1)
    control: Any = planner._control
    assert control.sent == [NONE, 0, 0, 3_000_000]
    assert planner.exchanges == 1


def test_step_times_are_gathered_after_all_ranks_know(clock: Clock) -> None:
    effort = RecordedTimer()
    planner = make_lone_consensus(effort=effort)
    planner._exchange()
    assert effort.calls == ["report"]
    effort.wanted = False
    planner._exchange()
    assert effort.calls == ["report", "report", "gather"]
    planner._exchange()
    assert effort.calls[3:] == ["report"]


def test_an_exchange_is_read_one_period_later(clock: Clock) -> None:
    planner = make_lone_consensus(every=5.0)
    clock.now += 5.0
    planner._notices.reason = NOTICE
    assert planner._exchange() == Decision()
    control: Any = planner._control
    assert control.sent == [NOTICE, 1, 0, 0]
    assert planner._take_decision() == Decision(NOTICE, save=True)
    assert planner._period == 2
    assert planner._take_decision() == Decision()  # it has been read
    exchanges = []
    for step in range(4):
        planner.note_step(step)
        exchanges.append(planner.exchanges)
    assert exchanges == [1, 2, 2, 3]


def test_a_save_that_was_just_decided_is_not_due_again(clock: Clock) -> None:
    planner = make_lone_consensus(every=5.0)
    clock.now += 5.0
    planner._exchange()
    assert planner._exchange().save
    control: Any = planner._control
    assert control.sent[1] == 0
    decided = make_lone_consensus(every_steps=2)
    decided._notices.reason = NOTICE
    decided.note_step(1)
    assert decided.note_step(2) == Decision(NOTICE, save=True)


def test_no_time_is_kept_for_steps_before_the_first(clock: Clock) -> None:
    for turns in (0, 1):
        planner = make_lone_consensus()
        for _ in range(turns):
            planner._exchange()
        assert _reason_with(planner, clock, 5.0 + 1.5 * 5.0 + 0.1) == NONE


def test_ranks_without_the_clock_of_saves_send_that_none_is_due(clock: Clock) -> None:
    planner = make_lone_consensus(every=1.0, rank=1)
    clock.now += 5.0
    assert planner.decide_now() == Decision()
