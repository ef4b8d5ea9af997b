"""Signals to a dry run of scripts that know nothing of hpc-ddp; here, and without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.children import start_child
from tests.command_line import call_here
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


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("ready", "w").close()
while True:
    time.sleep(0.05)
"""


def _dry_run(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a dry run of a script in `folder`, which has its runs; it has no torchrun."""
    env = dict(os.environ, HPC_DDP_RUNS=str(folder / "runs"), PYTHONPATH=str(REPO))
    argv = [sys.executable, "-m", "hpc_ddp", "dry-run", "--launcher", "srun", *words]
    return start_child(argv, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


def _status(folder: Path) -> tuple[str, str]:
    """Return state and reason of the run in `folder`."""
    words = ("status", "--json", "--runs-dir", str(folder / "runs"))
    (run,) = json.loads(call_here(folder, os.environ, *words).stdout)
    return run["state"], run["why"]


def _has_started(pid: int) -> bool:
    """Return whether a dry run has started the process of its run."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(b"\0dry_run\0" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)


def test_a_script_that_ignores_the_notice_is_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEAF)
    with _dry_run(tmp_path, "--signal", "B:TERM@12", "train.py") as process:
        wait_until((tmp_path / "ready").exists, "the script at work")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said
    lines = [line.removeprefix("hpc-ddp: ") for line in said.splitlines()]
    assert "the script has not ended since the notice, and its time is over: it is killed" in lines
    end = "notice (the script did not end by itself, and was killed)"
    assert f"attempt 0: {end}; it can go on" in lines
    assert _status(tmp_path) == ("stopped", f"{end}; can go on with --run")


def test_a_second_signal_ends_a_script_that_ignores_the_notice(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEAF)
    with _dry_run(tmp_path, "train.py") as process:
        wait_until((tmp_path / "ready").exists, "the script at work")
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)  # one that comes sooner is taken for the same
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said
    assert "a second signal: the workers are killed within some seconds" in said
    assert "(the script did not end by itself, and was killed); it can go on" in said


def test_a_signal_to_a_dry_run_that_starts_is_a_notice(tmp_path: Path) -> None:
    """It comes before the process of the run, which is to get it, can handle signals."""
    (tmp_path / "train.py").write_text(DEAF)
    with _dry_run(tmp_path, "--signal", "B:TERM@1", "train.py") as process:
        wait_until(lambda: _has_started(process.pid), "the process of the run")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said
    state, why = _status(tmp_path)
    assert (state, why.partition(" ")[0].rstrip(";")) == ("stopped", "notice"), said


def test_the_script_gets_the_signal_that_it_knows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "work").mkdir()
    words = ("--signal", "B:USR1@90", "--chdir", "work", "train.py")
    with _dry_run(tmp_path, *words) as process:
        wait_until((tmp_path / "work" / "ready").exists, "the script at work")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said
    assert (tmp_path / "work" / "saved").read_text() == "SIGUSR1"
    assert not frames_of_ours(said)
