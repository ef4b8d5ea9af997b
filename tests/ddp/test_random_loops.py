"""Loops drawn at random: none is changed by a peek or a resume without a warning."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

FIRST = int(os.environ.get("HPC_DDP_LOOPS_SEED", "1000"))


def play(crew: Any, first: int, count: int, *fault: str) -> tuple[list[str], int]:
    """Play the loops of the seeds from `first` on; return what is wrong, and their number."""
    output = crew.go(0, str(first), str(count), *fault, script="random_loops.py")
    (played,) = re.findall(r"^PLAYED (\d+)$", output, re.MULTILINE)
    return re.findall(r"^SEED .*", output, re.MULTILINE), int(played)


@pytest.mark.parametrize(
    ("after", "count"),
    [(0, 6), *(pytest.param(after, 50, marks=pytest.mark.more) for after in range(0, 500, 50))],
)
def test_no_loop_is_changed_without_a_word(crew: Any, after: int, count: int) -> None:
    wrong, played = play(crew, FIRST + after, count)
    assert (wrong, played) == ([], count), f"HPC_DDP_LOOPS_SEED={FIRST}"


KINDS = ("left", "frozen", "generator", "noise", "top", "settings", "stage")
LATER = [pytest.param(kind, marks=pytest.mark.more) for kind in KINDS]


@pytest.mark.parametrize("fault", ["peek", "random", *LATER])
def test_an_old_fault_is_seen(crew: Any, fault: str) -> None:
    wrong, played = play(crew, FIRST, 100, fault)
    assert wrong, f"not in {played} loops; HPC_DDP_LOOPS_SEED={FIRST}"
