"""A script that knows nothing of hpc-ddp, and a signal of its own; here, and without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.frames import frames_of_ours
from tests.waiting import LIMIT_S, wait_until

REPO = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
def save(number, frame):
    open("saved", "w").write(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
open("ready", "w").close()
while True:  # a signal that comes just before a sleep begins is not handled in it
    time.sleep(0.05)
"""


def test_the_script_gets_the_signal_that_it_knows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "work").mkdir()
    env = dict(os.environ, HPC_DDP_RUNS=str(tmp_path / "runs"), PYTHONPATH=str(REPO))
    words = (
        "dry-run",
        "--launcher",
        "srun",
        "--signal",
        "B:USR1@90",
        "--chdir",
        "work",
        "train.py",
    )
    argv = [sys.executable, "-m", "hpc_ddp", *words]
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.PIPE) as process:
        wait_until((tmp_path / "work" / "ready").exists, "the script at work")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said
    assert (tmp_path / "work" / "saved").read_text() == "SIGUSR1"
    assert not frames_of_ours(said.decode())
