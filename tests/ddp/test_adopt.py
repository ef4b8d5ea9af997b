"""The pairs in docs/adopt keep what they promise to a reader who lays them side by side."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.devices import DEVICE, RELEASE

ADOPT = Path(__file__).parents[2] / "docs" / "adopt"
LIMIT = 10  # changed or added lines


@dataclass(frozen=True)
class Pair:
    """How to run a pair on two ranks in a second or two.

    `signal_at` is a step of the second epoch, which ends with step `epoch_end` (without epochs the
    run); `leaves` are the files of weights that a run leaves behind.
    """

    name: str
    argv: str
    signal_at: int
    epoch_end: int
    leaves: tuple[str, ...]
    argv_before: str = ""  # further ones, for what `after` has no need of

    def before(self, crew: Any) -> str:
        argv = (*self.argv.split(), *self.argv_before.split())
        output: str = crew.go(2, *argv, script=str(ADOPT / f"{self.name}_before.py"))
        return output

    def after(self, crew: Any, ranks: int) -> str:
        argv = ("-1", self._after, *self.argv.split())
        output: str = crew.go(ranks, *argv, script="sigterm_at_step.py")
        return output

    def stopped(self, crew: Any, ranks: int) -> str:
        """Let all ranks of `after` be signalled; return what they printed until then."""
        argv = (str(self.signal_at), self._after, *self.argv.split())
        output: str = crew.go(ranks, *argv, script="sigterm_at_step.py")
        return output

    @property
    def _after(self) -> str:
        return str(ADOPT / f"{self.name}_after.py")


PAIRS = [
    Pair("multigpu", "3 --batch_size 64", 20, 32, ("model.pt",), argv_before="2"),
    Pair("mingpt", "--amp --epochs 2 --sums 50 --block-size 8 --batch-size 8", 28, 50, ("gpt.pt",)),
    Pair("classifier", "--epochs 2", 28, 46, ("last.pt", "best.pt")),
    Pair("steps", "--steps 60", 28, 60, ("model.pt",)),
]
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
each_pair_here = pytest.mark.parametrize(
    "pair",
    [pair for pair in PAIRS if (DEVICE, pair.name) != ("sim", "steps")],
    ids=lambda pair: pair.name,
)  # the stand-in has no fused cell of a GRU


@each_pair
def test_at_most_ten_lines_are_changed_or_added(pair: Pair) -> None:
    before, after = (
        (ADOPT / f"{pair.name}_{side}.py").read_text().splitlines() for side in ("before", "after")
    )
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(new) <= LIMIT, "\n".join(new)
    readme = (ADOPT / "README.md").read_text()
    assert [line for line in new if "+" + line[2:] not in readme] == []
    assert len(after) < len(before)


def test_a_script_takes_the_device_of_the_run() -> None:
    """torch's own choice differs on a Mac, whose tensors no backend carries."""
    for pair in PAIRS:
        assert "current_accelerator" not in (ADOPT / f"{pair.name}_after.py").read_text()


def test_no_pair_is_left_out() -> None:
    assert {path.name for path in ADOPT.glob("*.py")} == {
        f"{pair.name}_{side}.py" for pair in PAIRS for side in ("before", "after")
    }


@pytest.mark.more  # torch and torchvision alone: only a new torch can change that
@pytest.mark.skipif(
    DEVICE == "sim" and RELEASE < (2, 15),
    reason="torch 2.9 takes Gloo for the default, unless init_process_group is given a backend",
)
@each_pair_here
def test_before_runs_to_its_end(pair: Pair, crew: Any) -> None:
    assert {"epoch 1", "eval 40"} & set(re.findall(r"^(?:epoch|eval) \d+", pair.before(crew), re.M))
    assert all((crew.base / name).exists() for name in pair.leaves)


@each_pair_here
def test_after_goes_on_in_mid_epoch_as_if_nothing_had_been(
    pair: Pair, make_crew: Callable[[str], Any]
) -> None:
    check(pair, 2, make_crew)


def test_one_process_alone_does_too(make_crew: Callable[[str], Any]) -> None:
    check(Pair("classifier", "--epochs 2", 50, 90, ("last.pt", "best.pt")), 0, make_crew)


def check(pair: Pair, ranks: int, make_crew: Callable[[str], Any]) -> None:
    """Compare an interrupted run with a whole one: what they print, and their weights."""
    whole, crew = make_crew("whole"), make_crew("stopped")
    expected = pair.after(whole, ranks)
    output = pair.stopped(crew, ranks)
    (stop,) = crew.events("stopped")
    assert pair.signal_at <= stop["step"] < pair.epoch_end
    assert not (crew.base / pair.leaves[0]).exists()
    output += pair.after(crew, ranks)
    assert said(output) == said(expected)
    for name in pair.leaves:
        assert (crew.base / name).read_bytes() == (whole.base / name).read_bytes(), name


def said(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("epoch", "best", "eval"))]
