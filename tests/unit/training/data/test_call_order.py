"""Calls of a run in an order that can't be right are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.data.call_order import CallOrder, check_tracked


def enter(calls: CallOrder, total: Any, is_tracked: bool = True) -> None:
    calls.enter_loop("steps", total, is_tracked, Position()).__enter__()


def test_a_loop_is_left_at_its_end_and_at_an_error() -> None:
    calls = CallOrder()
    with calls.enter_loop("steps", 5, True, Position()):
        assert (calls.loop, calls.total) == ("steps", 5)
        calls.note_batch()
        calls.check_step(False)
    assert (calls.loop, calls.total) == (None, 5)
    with pytest.raises(KeyError), calls.enter_loop("epochs", 2, True, Position()):
        raise KeyError
    assert calls.loop is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda calls: enter(calls, "5"), "run.steps was given '5'"),
        (lambda calls: enter(calls, 5, is_tracked=False), "run.track was not called"),
        (lambda calls: calls.check_loader(True, False), "has a training loader already"),
        (lambda calls: calls.check_loader(False, True), "run.loader was called after run.track"),
        (lambda calls: calls.note_batch(), "iterated outside run.epochs"),
        (lambda calls: calls.check_update(False), "in the midst of accumulating gradients"),
        (lambda calls: calls.check_step(False), "outside of run.epochs and run.steps"),
        (lambda calls: calls.check_body(False), "ended without run.step()"),
    ],
)
def test_a_wrong_call_outside_of_a_loop(call: Callable[[CallOrder], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
        call(CallOrder())


def test_a_wrong_call_in_a_loop() -> None:
    calls = CallOrder()
    with calls.enter_loop("epochs", 5, True, Position()):
        with pytest.raises(UsageError, match=r"run\.steps was called inside run\.epochs"):
            enter(calls, 5)
        assert calls.loop == "epochs"
        with pytest.raises(UsageError, match="called twice for one batch"):
            calls.check_step(True)
    calls.check_loader(False, False)
    calls.check_update(True)
    calls.check_body(True)


def test_the_best_checkpoint_has_the_weights_that_were_judged() -> None:
    calls = CallOrder()
    calls.close_judgement(5)
    calls.judged_at = 5
    calls.close_judgement(5)
    calls.judged_at = 4
    with pytest.raises(UsageError, match=r"run\.best has judged the weights of step 4"):
        calls.close_judgement(5)
    calls.close_judgement(5)


def test_only_an_error_that_came_after_the_loop_began_ends_the_script() -> None:
    calls = CallOrder()
    assert not calls.is_failing()
    try:
        raise FileNotFoundError
    except FileNotFoundError:
        assert calls.is_failing()  # as in ``finally: run.finish()``
        assert not CallOrder().is_failing()  # started where an error is handled
        with calls.enter_loop("epochs", 1, True, Position()):
            pass
        assert not calls.is_failing()  # trained there
        try:
            raise KeyError
        except KeyError:
            assert calls.is_failing()
    assert not calls.is_failing()
    assert calls.has_looped


def loop(calls: CallOrder, position: Position, total: int) -> Iterator[bool]:
    with calls.enter_loop("steps", total, True, position) as (is_over, _):
        yield is_over


def test_a_loop_that_was_abandoned_is_over_for_the_next_attempt() -> None:
    position, first, second = Position(), CallOrder(), CallOrder()
    list(loop(first, position, 3))
    position.step = 3  # it was trained to its end
    for _ in loop(first, position, 9):
        break
    assert position.abandoned == {}
    first.abandon_loops(position)
    assert position.abandoned == {2: ("steps", 9)}
    assert list(loop(second, position, 3)) == [True]
    assert list(loop(second, position, 9)) == [True]
    assert position.abandoned == {2: ("steps", 9)}  # so there is nothing to save
    for _ in loop(second, position, 8):  # the next stage, with saves in its loop
        assert (position.abandoned, position.loops) == ({2: ("steps", 9)}, 3)
    third = CallOrder()
    assert list(loop(third, position, 3)) == [True]
    assert list(loop(third, position, 12)) == [False]  # it was given more
    assert position.abandoned == {}


def test_a_loop_behind_one_that_was_left_shows_that_the_script_does_not_come_back() -> None:
    position, calls = Position(), CallOrder()
    for _ in loop(calls, position, 9):
        break
    for _ in loop(calls, position, 12):
        assert (position.abandoned, position.loops) == ({1: ("steps", 9)}, 2)
    again = CallOrder()
    assert list(loop(again, position, 9)) == [True]
    assert list(loop(again, position, 12)) == [False]


def test_a_loop_of_another_number_or_kind_is_not_the_one_that_was_abandoned() -> None:
    """As behind ``if not run.resumed:`` around the first one."""
    position, first, second = Position(), CallOrder(), CallOrder()
    for _ in loop(first, position, 9):
        break
    first.abandon_loops(position)
    with second.enter_loop("epochs", 9, True, position) as (is_over, _):
        assert not is_over
    assert list(loop(CallOrder(), position, 8)) == [False]


def test_a_loop_that_is_tried_again_after_an_error_is_not_abandoned() -> None:
    calls, position = CallOrder(), Position()
    with pytest.raises(ZeroDivisionError):
        list(1 // 0 for _ in loop(calls, position, 9))
    calls.abandon_loops(position)  # as by run.load_best
    assert list(loop(calls, position, 9)) == [False]
    assert position.abandoned == {}


def test_the_loop_of_a_checkpoint_is_known_by_number_or_by_total() -> None:
    """A script may leave out its first loop at a resume, or give its last one more steps."""
    position = Position(step=9, loops=2, loop=("steps", 12))
    for totals, expected in (
        ([6, 12], [False, True]),
        ([6, 15], [False, True]),
        ([12], [True]),
        ([6, 7, 12], [False, False, True]),
    ):
        calls, known = CallOrder(), []
        for total in totals:
            own = replace(position)
            for _ in loop(calls, own, total):
                known.append(calls.is_checkpoints)
                break
        assert known == expected, totals


def test_behind_all_loops_the_checkpoint_is_of_no_later_one() -> None:
    position = Position(step=12, loops=2, loop=("steps", 12))
    for totals, is_before in (([6], True), ([6, 12], False), ([12], False)):
        calls = CallOrder()
        for total in totals:
            list(loop(calls, position, total))
        assert calls.is_before_loop_of(position) == is_before, totals


def break_off(calls: CallOrder, position: Position) -> None:
    for _ in loop(calls, position, 9):
        break


def fail(calls: CallOrder, position: Position) -> None:
    for _ in loop(calls, position, 9):
        _ = 1 / 0


def test_two_loops_of_one_total_are_warned_of() -> None:
    lines: list[str] = []
    calls, position = CallOrder(lines.append), Position()
    for _ in range(2):  # one that is tried again
        for _ in loop(calls, position, 9):
            break
    assert lines == []
    for _ in loop(calls, position, 9):
        break
    assert [line.partition(":")[2] for line in lines] == [
        " run.steps(9) comes twice: a resume in the second one would begin in the first; accepted:"
        " loops of different totals"
    ]
    for count in range(2):  # by one function, and the second time from the same place
        break_off(calls, position)
        assert len(lines) == 2, count
    break_off(calls, position)
    assert len(lines) == 3
    with pytest.raises(ZeroDivisionError):
        fail(calls, position)
    assert len(lines) == 4
    break_off(calls, position)  # tried again, behind an error
    assert len(lines) == 4


@pytest.mark.parametrize("places", [None, 5, "model", ("loader",)])
def test_names_that_are_none_are_refused(places: Any) -> None:
    for words in ((places, ()), ((), places)):
        with pytest.raises(UsageError, match="accepted: a tuple of names of tracked objects"):
            check_tracked({"model": object()}, *words)
