"""The benches of `bench/scale`, small: none of their figures counts here, only that they run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("scale/ranks.py 6 4", "the same as that of one rank: True"),
        ("scale/control.py 6 8", "| 8 | tree | "),
        ("checkpoint_index.py 8 10", "a file each: "),
    ],
    ids=lambda word: word.split()[0],
)
def test_a_bench_runs(words: str, text: str) -> None:
    """They use parts of the library that nothing outside of it calls otherwise."""
    script, *numbers = words.split()
    argv = [sys.executable, str(REPO / "bench" / script), *numbers]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    done = subprocess.run(argv, capture_output=True, text=True, env=environ)
    assert (done.returncode, text in done.stdout) == (0, True), done.stdout + done.stderr
