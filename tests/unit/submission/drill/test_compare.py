"""Records of two runs are compared: the first difference, its cause, and the words for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_ddp.core.journal.events import DrillRecord
from hpc_ddp.submission.drill import compare
from hpc_ddp.submission.drill.compare import Difference, explain, first_difference

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
    again[1:] = [but(drill_record, "state", model_model="other") for drill_record in again[1:]]
    difference = first_difference(BASE, again)
    assert difference is not None
    assert (difference.step, difference.at_start, difference.kind) == (7, True, "optimizer")
    assert difference.also == ("scheduler scheduler",)
    assert not difference.is_rounding
    why, hint = explain(difference, True, "stopped")
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
    difference = first_difference(BASE, again)
    assert difference is not None
    assert (difference.step, difference.at_start, difference.kind) == (9, False, kind)
    assert not difference.is_rounding
    assert words in explain(difference, True, "killed")[0]


def test_any_rank_can_be_the_first() -> None:
    base = [*BASE, *(record(s, rank=1) for s in range(1, 20))]
    again = [*run(7, 8, 9, attempt=1), *(record(s, attempt=1, rank=1) for s in (8, 9))]
    again[-1] = but(again[-1], "state", random_torch="x")
    difference = first_difference(base, again)
    assert difference is not None
    assert (difference.step, difference.ranks, difference.kind) == (9, (1,), "random")


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
    difference = first_difference(BASE, again)
    assert difference is not None
    assert difference.kind == "gradients"
    assert difference.relative == pytest.approx(1e-7, rel=0.01)
    assert difference.is_rounding == is_rounding
    assert "added up in another order" in compare.describe_rounding(difference)


def test_other_random_numbers_are_no_rounding() -> None:
    again = run(7, 8, attempt=1)
    again[1] = but(again[1], "state", random_torch="x")
    again[1] = but(again[1], "used", gradients="x")
    difference = first_difference(BASE, again)
    assert difference is not None
    assert not difference.is_rounding


def test_a_script_that_is_not_reproducible_is_not_blamed_for_its_resume() -> None:
    difference = Difference(step=1, at_start=False, kind="loss", name="", attempt=0)
    why, hint = explain(difference, False, "")
    assert "two undisturbed runs differ already" in why
    assert "seed" in hint


def test_steps_at_another_place_in_the_epochs_are_a_difference() -> None:
    again = run(*range(7, 20), attempt=1)
    again[8:] = [replace(drill_record, epoch=1, samples=0) for drill_record in again[8:]]
    difference = first_difference(BASE, again)
    assert difference is not None
    assert (difference.kind, difference.step, difference.is_rounding) == ("position", 15, False)
    assert (
        "the place in the epochs differs first, at step 15"
        in explain(difference, True, "killed")[0]
    )


def test_more_steps_than_in_the_undisturbed_run_are_a_difference() -> None:
    difference = first_difference(BASE, [*run(*range(7, 20), attempt=1), record(20, attempt=1)])
    assert difference is not None
    assert (difference.kind, difference.step) == ("position", 20)
    ended = [*run(*range(7, 12), attempt=1), record(11, "end", attempt=1, epoch=1, samples=0)]
    early = first_difference(BASE, ended)
    assert early is not None
    assert early.kind == "position"


def test_weights_that_differ_behind_equal_gradients_are_not_rounding() -> None:
    again = run(*range(7, 20), attempt=1)
    again[3] = but(again[3], "state", optimizer_optimizer="other rate", model_model="so")
    difference = first_difference(BASE, again)
    assert difference is not None
    assert (difference.kind, difference.is_rounding) == ("optimizer", False)


def test_an_attempt_begins_with_what_the_one_before_has_saved() -> None:
    first = run(*range(7, 20), attempt=1)
    for k in range(1, len(first)):
        first[k] = but(first[k], "used", gradients=f"rounded{k}")
        first[k] = but(first[k], "state", model_model=f"rounded{k}")
        first[k] = but(first[k], "values", loss=first[k].values["loss"] * (1 + 1e-6))
    difference = first_difference(BASE, first)
    assert difference is not None
    assert difference.is_rounding
    second = [replace(drill_record, attempt=2) for drill_record in first[5:]]
    second[0] = replace(second[0], at="start", used={}, values={})
    difference = first_difference(BASE, second, earlier=first)
    assert difference is not None
    assert (difference.at_start, difference.is_rounding) == (False, True)
    second[0] = but(second[0], "state", optimizer_optimizer="new")
    difference = first_difference(BASE, second, earlier=first)
    assert difference is not None
    assert (difference.at_start, difference.kind, difference.is_rounding) == (
        True,
        "optimizer",
        False,
    )
