"""What two runs' records say: where they part, whose fault it is, and in which words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.journal.events import DrillRecord
from hpc_ddp.submission.drill import compare
from hpc_ddp.submission.drill.compare import Difference, explain, first_difference
from hpc_ddp.submission.drill.disturb import LEAST_STEPS, choose
from hpc_ddp.submission.drill.result import DrillResult, Row

STATE = {
    "model model": "m",
    "optimizer optimizer": "o",
    "settings optimizer": "l",
    "scheduler scheduler": "s",
    "random torch": "r",
}


def record(
    step: int, at: str = "step", attempt: int = 0, rank: int = 0, **more: Any
) -> DrillRecord:
    """Return a record whose digests are those of the undisturbed run at this step."""
    used = {"gradients": "g", "untracked SGD": "u"} if at == "step" else {}
    undisturbed = DrillRecord(
        rank=rank,
        at=at,
        step=step,
        epoch=0,
        samples=8 * step,
        used={name: f"{digest}{step}" for name, digest in used.items()},
        state={name: f"{digest}{step}" for name, digest in STATE.items()},
        values={"loss": 1 / (step + 1)} if at == "step" else {},
        sizes={"gradients": 2.0 + step, "weights": 3.0 + step},
        attempt=attempt,
    )
    return replace(undisturbed, **more)


def run(*steps: int, attempt: int = 0) -> list[DrillRecord]:
    return [record(steps[0], "start", attempt), *(record(s, attempt=attempt) for s in steps[1:])]


def but(record: DrillRecord, group: str, **changes: Any) -> DrillRecord:
    """Return a record with other values in one of its groups; `_` in a name is a space."""
    spaced = {name.replace("_", " "): value for name, value in changes.items()}
    values: dict[str, Any] = {group: {**getattr(record, group), **spaced}}
    return replace(record, **values)


BASE = run(*range(20))


def test_equal_runs_have_no_difference_wherever_they_begin() -> None:
    assert first_difference(BASE, run(*range(20))) is None
    assert first_difference(BASE, run(*range(7, 20), attempt=1)) is None


def test_state_that_is_lost_shows_when_the_loop_begins() -> None:
    again = run(*range(7, 12), attempt=1)
    again[0] = but(again[0], "state", optimizer_optimizer="new", scheduler_scheduler="new")
    again[1:] = [but(each, "state", model_model="other") for each in again[1:]]
    found = first_difference(BASE, again)
    assert found is not None
    assert (found.step, found.at_start, found.kind) == (7, True, "optimizer")
    assert found.also == ("scheduler scheduler",)
    assert not found.is_rounding
    why, hint = explain(found, True, "stopped")
    assert "After it was stopped, the optimizer `optimizer` differs first" in why
    assert "changed between run.track and the loop" in why
    assert hint == "look at what happens to optimizer after run.track"


@pytest.mark.parametrize(
    ("group", "changes", "kind", "words"),
    [
        ("state", {"settings_optimizer": "x"}, "settings", "run.track does not name a scheduler"),
        ("used", {"untracked_SGD": "x"}, "untracked", "`SGD` differs first, at step 9: run.track"),
        ("state", {"random_torch": "x"}, "random", "torch's generator"),
        ("state", {"scheduler_scheduler": "x"}, "scheduler", "lost or made twice"),
        ("values", {"loss": 5.0}, "loss", "that no checkpoint holds"),
        ("used", {"gradients": "x"}, "gradients", "that no checkpoint holds"),
    ],
)
def test_the_first_cause_in_a_step_is_named(
    group: str, changes: dict[str, Any], kind: str, words: str
) -> None:
    again = run(*range(7, 12), attempt=1)
    for number in (2, 3, 4):  # and whatever comes of it
        again[number] = but(again[number], "state", model_model="x", optimizer_optimizer="x")
        again[number] = but(again[number], "sizes", gradients=99.0)
        again[number] = but(again[number], group, **changes)
    found = first_difference(BASE, again)
    assert found is not None
    assert (found.step, found.at_start, found.kind) == (9, False, kind)
    assert not found.is_rounding
    assert words in explain(found, True, "killed")[0]


def test_any_rank_can_be_the_first() -> None:
    base = [*BASE, *(record(s, rank=1) for s in range(1, 20))]
    again = [*run(7, 8, 9, attempt=1), *(record(s, attempt=1, rank=1) for s in (8, 9))]
    again[-1] = but(again[-1], "state", random_torch="x")
    found = first_difference(base, again)
    assert found is not None
    assert (found.step, found.ranks, found.kind) == (9, (1,), "random")


@pytest.mark.parametrize(("later", "is_rounding"), [(1e-6, True), (0.3, False)])
def test_another_order_of_sums_is_no_failure_unless_it_grows(
    later: float, is_rounding: bool
) -> None:
    again = run(*range(7, 20), attempt=1)
    for number in range(2, len(again)):
        by = later if number > 5 else 1e-7
        again[number] = but(again[number], "used", gradients="x")
        again[number] = but(again[number], "state", model_model="x")
        sizes = {name: size * (1 + by) for name, size in again[number].sizes.items()}
        again[number] = replace(again[number], sizes=sizes)
    found = first_difference(BASE, again)
    assert found is not None
    assert found.kind == "gradients"
    assert found.relative == pytest.approx(1e-7, rel=0.01)
    assert found.is_rounding == is_rounding
    assert "added up in another order" in compare.rounding(found)


def test_other_random_numbers_are_no_rounding() -> None:
    again = run(7, 8, attempt=1)
    again[1] = but(again[1], "state", random_torch="x")
    again[1] = but(again[1], "used", gradients="x")
    found = first_difference(BASE, again)
    assert found is not None
    assert not found.is_rounding


def test_a_script_that_is_not_reproducible_is_not_blamed_for_its_resume() -> None:
    found = Difference(step=1, at_start=False, kind="loss", name="", attempt=0)
    why, hint = explain(found, False, "")
    assert "two undisturbed runs differ already" in why
    assert "seed" in hint


@pytest.mark.parametrize(
    ("total", "ends"),
    [(8, []), (9, [3, 6, 9]), (24, [6, 12, 18, 24]), (40, []), (250, [50, 100, 150, 200, 250])],
)
def test_the_disturbances_leave_room_for_each_other(total: int, ends: list[int]) -> None:
    points = choose(total, ends)
    assert 2 <= points.stop < points.save < points.kill < total
    assert points.stop not in ends
    if ends:
        assert points.stop > ends[0]
        assert points.save in ends


def test_a_run_that_is_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match="takes 5 steps, and a drill needs 8"):
        choose(LEAST_STEPS - 3, [])


def test_the_report_is_a_table_and_a_verdict() -> None:
    rows = [
        Row("undisturbed, 24 steps", True),
        Row("stopped", True, 7, ()),
        Row("killed", True, 3, ("step-7: damaged",)),
    ]
    text = DrillResult("/a/train.py", Path("/runs"), rows=rows).text()
    assert "killed                 yes       step 3, past step-7  equal" in text
    assert text.endswith("equal, bit for bit, and so are the final weights")
    wrong = DrillResult("/a/train.py", Path("/runs"), verdict="wrong", why="Why.", hint="do")
    assert wrong.text().endswith("train.py does NOT resume right. Why.\nhint: do")
    assert wrong.to_dict()["folder"] == "/runs"


def test_steps_at_another_place_in_the_epochs_are_a_difference() -> None:
    again = run(*range(7, 20), attempt=1)
    again[8:] = [replace(each, epoch=1, samples=0) for each in again[8:]]
    found = first_difference(BASE, again)
    assert found is not None
    assert (found.kind, found.step, found.is_rounding) == ("position", 15, False)
    assert "the place in the epochs differs first, at step 15" in explain(found, True, "killed")[0]


def test_more_steps_than_in_the_undisturbed_run_are_a_difference() -> None:
    found = first_difference(BASE, [*run(*range(7, 20), attempt=1), record(20, attempt=1)])
    assert found is not None
    assert (found.kind, found.step) == ("position", 20)
    ended = [*run(*range(7, 12), attempt=1), record(11, "end", attempt=1, epoch=1, samples=0)]
    early = first_difference(BASE, ended)
    assert early is not None
    assert early.kind == "position"


def test_weights_that_differ_behind_equal_gradients_are_not_rounding() -> None:
    again = run(*range(7, 20), attempt=1)
    again[3] = but(again[3], "state", optimizer_optimizer="other rate", model_model="so")
    found = first_difference(BASE, again)
    assert found is not None
    assert (found.kind, found.is_rounding) == ("optimizer", False)


def test_an_attempt_begins_with_what_the_one_before_has_saved() -> None:
    first = run(*range(7, 20), attempt=1)
    for k in range(1, len(first)):
        first[k] = but(first[k], "used", gradients=f"rounded{k}")
        first[k] = but(first[k], "state", model_model=f"rounded{k}")
        first[k] = but(first[k], "values", loss=first[k].values["loss"] * (1 + 1e-6))
    found = first_difference(BASE, first)
    assert found is not None
    assert found.is_rounding
    second = [replace(each, attempt=2) for each in first[5:]]
    second[0] = replace(second[0], at="start", used={}, values={})
    found = first_difference(BASE, second, earlier=first)
    assert found is not None
    assert (found.at_start, found.is_rounding) == (False, True)
    second[0] = but(second[0], "state", optimizer_optimizer="new")
    found = first_difference(BASE, second, earlier=first)
    assert found is not None
    assert (found.at_start, found.kind, found.is_rounding) == (True, "optimizer", False)
