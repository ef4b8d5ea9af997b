"""Skips of tests for which this machine lacks something: a failure where CI must run them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def skip_or_fail(reason: str) -> None:
    """Skip a test on a user's machine; with CI=true, where all of this can be had, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must run this test: {reason}")
    pytest.skip(reason)


def needs_stand_in() -> None:
    """Skip or fail where the stand-in accelerator of tests/device can't be compiled.

    It is compiled here, once: that may take minutes, which a limit within the test does not have.
    """
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        skip_or_fail("the stand-in device is compiled by g++ and ninja (apt: g++ ninja-build)")
    _compile_stand_in()


@functools.cache
def _compile_stand_in() -> None:
    device = Path(__file__).parent / "device"
    env = os.environ | {"PYTHONPATH": str(device)}
    subprocess.run([sys.executable, "-c", "import sim; sim.build()"], env=env, check=True)
