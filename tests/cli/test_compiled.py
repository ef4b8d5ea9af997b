"""What torch's compiler is asked for, where a model is wrapped with ``compile=True``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import ROOT, device_env

SCRIPT = ROOT / "tests" / "ddp" / "scripts" / "compiled_model.py"


@pytest.mark.more
def test_compiled_kernels_are_not_chosen_by_their_speed(tmp_path: Path) -> None:
    """Forward and backward: another node, or another moment, would choose others."""
    env = {**os.environ, **device_env("cpu"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    argv = [sys.executable, str(SCRIPT)]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOWERED")]
    assert lines == ["LOWERED True"] * 2
