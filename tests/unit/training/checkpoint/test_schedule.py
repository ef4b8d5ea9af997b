"""Saves are due by steps, by time and by failures; old checkpoints are pruned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core import checkpoints
from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.training.checkpoint import schedule
from hpc_ddp.training.checkpoint.schedule import slowest_save, time_between_failures, young_daly
from hpc_ddp.training.checkpoint.storage import disk
from hpc_ddp.training.checkpoint.storage.retention import Retention, prune
from tests.raw_events import typed
from unit.fakes import Clock, stop_clock
from unit.training.checkpoint.fakes import names_in
from unit.training.fakes import Saves, make_schedule


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, schedule)


def test_pruning_keeps_the_newest_and_bad_ones(tmp_path: Path) -> None:
    for name in ["step-1", "step-2", "step-3", "step-10", "step-10.old-0", "step-4.bad-0"]:
        (tmp_path / name).mkdir()
    prune(tmp_path, Retention(2))
    assert names_in(tmp_path) == ["step-10", "step-3", "step-4.bad-0"]
    disk.remove(tmp_path / "step-1")  # somebody else was faster


def test_a_checkpoint_whose_place_nothing_has_taken_yet_is_not_pruned(tmp_path: Path) -> None:
    """A save of the same step was killed between its two renames."""
    for name in ["step-5", "step-10.old-0", "step-10.old-1", "step-3.old-0"]:
        (tmp_path / name).mkdir()
    prune(tmp_path, Retention(2))
    assert names_in(tmp_path) == ["step-10.old-1", "step-5"]


@pytest.mark.parametrize(
    ("steps", "due"),
    [(range(4, 12), [5, 10]), (range(2, 21, 2), [6, 10, 16, 20]), ([6, 9, 12], [12])],
    ids=["each", "two at once", "behind a resume"],
)
def test_saves_by_steps_also_where_several_are_counted_at_once(
    steps: Sequence[int], due: list[int]
) -> None:
    timed = make_schedule(every_steps=5)
    assert [step for step in steps if timed.note_step(step)] == due


def test_the_best_and_one_of_every_n_steps_stay(tmp_path: Path) -> None:
    for step in range(5, 65, 5):
        (tmp_path / f"step-{step}").mkdir()
        prune(tmp_path, Retention(last=2, every=20), pinned=[35])
    remaining = sorted(map(checkpoints.step_of, tmp_path.iterdir()))
    assert remaining == [5, 20, 35, 40, 55, 60]


def test_a_clock_waits_for_the_save_under_way_and_retries_a_failed_one_soon() -> None:
    saves = Saves()
    saves_clock = make_schedule(saves, every=0.0)
    assert saves_clock.is_due()
    saves.in_flight = True
    assert not saves_clock.is_due()
    saves.slowest_save_s = 7.0
    assert saves_clock.save_s() == 14.0
    saves.in_flight, saves.failed = False, True
    saves_clock = make_schedule(saves, every=1000.0)
    assert not saves_clock.is_due()
    saves_clock._save_began -= 31
    assert saves_clock.is_due()


def test_the_auto_interval_is_young_and_dalys(capsys: Any) -> None:
    history: list[JournalEvent] = []
    for attempt, end in enumerate(("failed", "stopped", "verdict")):  # two that lost something
        for event, at in (("first_step", 0), ("checkpoint", 10), (end, 28_800)):
            more = {"stall_s": 0.5, "write_s": 2.5} if event == "checkpoint" else {}
            history.append(typed(event, 1e9 + at, attempt, **more))
    assert time_between_failures(history) == 2 * 86_400 / 3
    saves = Saves()
    saves_clock = make_schedule(
        saves,
        every="auto",
        slowest_save_s=slowest_save(history),
        failure_interval_s=time_between_failures(history),
    )
    assert saves_clock.save_s() == 3.0
    assert not saves_clock.is_due()
    saves.slowest_save_s, saves.stall_s = 1.0, 0.5
    for _ in range(2):
        saves_clock.note_save()
    assert saves_clock._every_s == pytest.approx(240)
    assert capsys.readouterr().err == (
        "hpc-ddp: saving every 240 s: a save holds the training up for 0.500 s, and a failure is"
        " expected every 16.0 h; together 0.42 % of the time\n"
    )


@pytest.mark.parametrize(
    ("every", "failed", "due_at"),
    [
        (100.0, False, 100),
        (100.0, True, 30),
        (10.0, True, 10),
        (None, False, None),
        (None, True, 30),
    ],
)
def test_a_save_is_due_after_its_interval(
    clock: Clock, every: float | None, failed: bool, due_at: int | None
) -> None:
    saves = Saves()
    saves.failed = failed
    planner, rank_1 = make_schedule(saves, every=every), make_schedule(saves, rank=1, every=every)
    result = []
    for _ in range(200):
        result.append(planner.is_due())
        assert not rank_1.is_due()
        clock.now += 1
    assert (result.index(True) if True in result else None) == due_at
    planner.note_save()
    assert not planner.is_due()


def test_the_interval_is_within_bounds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert young_daly(2.0, 100.0) == 20.0
    for stall_s, slowest_s, every in ((0.0, 5.0, 20.0), (1e9, 5.0, 3600.0)):
        saves = Saves()
        planner = make_schedule(saves, every="auto")
        assert planner._every_s == 30.0
        planner.note_save()  # nothing has been measured
        assert capsys.readouterr().err == ""
        saves.stall_s, saves.slowest_save_s = stall_s, slowest_s
        planner.note_save()
        assert planner._every_s == every
        assert "hpc-ddp: saving every" in capsys.readouterr().err
    rank_1 = make_schedule(saves, rank=1, every="auto")
    rank_1.note_save()
    assert capsys.readouterr().err == ""
    assert planner.save_s() == 5.0
    saves.in_flight = True
    assert planner.save_s() == 10.0


def test_an_attempt_without_steps_is_no_failure() -> None:
    assert time_between_failures([]) == 86_400.0
    assert time_between_failures([typed("started", 5.0)]) == 86_400.0


def test_the_value_before_is_the_best_again_where_a_save_has_failed() -> None:
    values = schedule.BestValues()
    values.judge(0.5, higher=True)
    assert values.begin_save(1) is None
    values.end_save(True)
    values.judge(0.9, higher=True)
    assert values.begin_save(2) is None
    values.end_save(False)
    assert (values.best.value, values.best.step) == (0.9, None)
    values.judge(0.6, higher=True)
    assert values.begin_save(3) == 0.9
    assert values.best == schedule.Best(0.5, 1, stale=2)
    values.end_save(True)
    assert values.best.step == 1


def test_a_better_value_comes_while_a_save_is_under_way() -> None:
    values = schedule.BestValues()
    values.judge(0.5, higher=True)
    values.begin_save(1)
    values.judge(0.6, higher=True)
    values.end_save(True)  # the first one's
    assert values.begin_save(2) is None
    values.end_save(False)
    assert values.begin_save(3) == 0.6
    assert (values.best.value, values.best.step) == (0.5, 1)


def test_each_value_during_a_save_counts() -> None:
    """Early stopping came too late: of several values one was counted."""
    values = schedule.BestValues()
    values.judge(0.5, higher=True)
    values.begin_save(1)
    values.judge(0.6, higher=True)
    values.judge(0.4, higher=True)
    values.end_save(True)  # that of 0.5
    values.begin_save(3)
    values.end_save(False)  # that of 0.6
    assert values.begin_save(4) == 0.6
    assert values.best == schedule.Best(0.5, 1, stale=2)


def test_a_new_best_value_takes_the_place_of_one_that_was_lost() -> None:
    values = schedule.BestValues()
    values.judge(0.5, higher=True)
    values.begin_save(1)
    values.end_save(False)
    values.judge(0.7, higher=True)
    assert values.begin_save(2) is None
    values.end_save(True)
    assert values.best == schedule.Best(0.7, 2)
    lost = schedule.BestValues()
    lost.judge(0.5, higher=True)
    lost.begin_save(1)
    lost.end_save(False)
    assert lost.begin_save(2) == 0.5
    assert lost.best.value is None
    assert lost.best.step is None
