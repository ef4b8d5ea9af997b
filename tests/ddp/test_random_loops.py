"""Loops drawn at random: none is changed by a peek or a resume without a warning."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

FIRST = int(os.environ.get("HPC_DDP_LOOPS_SEED", "1000"))


def play(crew: Any, count: int, *fault: str) -> tuple[list[str], int]:
    """Play so many loops; return what is wrong, and the number of loops."""
    output = crew.go(0, str(FIRST), str(count), *fault, script="random_loops.py")
    (played,) = re.findall(r"^PLAYED (\d+)$", output, re.MULTILINE)
    return re.findall(r"^SEED .*", output, re.MULTILINE), int(played)


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.more)])
def test_no_loop_is_changed_without_a_word(crew: Any, count: int) -> None:
    wrong, played = play(crew, count)
    assert (wrong, played) == ([], count), f"HPC_DDP_LOOPS_SEED={FIRST}"


@pytest.mark.parametrize("fault", ["peek", "random"])
def test_an_old_fault_is_seen(crew: Any, fault: str) -> None:
    wrong, played = play(crew, 100, fault)
    assert wrong, f"not in {played} loops; HPC_DDP_LOOPS_SEED={FIRST}"
