"""A thread of the script does not keep a worker alive whose script is over."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import subprocess, sys, threading, time
from hpc_ddp.training.process import exit_watch
exit_watch.LOOK_EVERY_S = 0.01
exit_watch.STOPPED_S, exit_watch.IDLE_S = {stopped_s}, {idle_s}
time.process_time = {process_time}
exit_watch.watch_exit(False)
exit_watch.watch_exit({is_stop})
threading.Thread(target={target}, name="uploads").start()
{more}
print("the last line")
"""
AT_EXIT = """
import atexit
atexit.register(lambda: (time.sleep(1), print("the last function")))
"""
NEVER = "lambda: threading.Event().wait()"
SOON = "lambda: time.sleep(1)"
HAS_CHILD = 'lambda: subprocess.run(["sleep", "1"])'


@pytest.mark.parametrize(
    ("is_stop", "stopped_s", "idle_s", "is_busy", "target", "end"),
    [
        (True, 0.2, 60, False, NEVER, "the process is ended"),
        (False, 60, 0.2, False, SOON, "it keeps the job's nodes"),
        (True, 0.2, 60, True, NEVER, "the process is ended"),
        (False, 60, 0.2, True, SOON, ""),
        (False, 60, 0.2, False, HAS_CHILD, ""),
        (False, 60, 60, False, SOON, ""),
    ],
    ids=["stopped", "idle", "busy after a stop", "busy", "a child", "soon over"],
)
def test_a_thread_keeps_no_worker_that_has_stopped(
    is_stop: bool, stopped_s: float, idle_s: float, is_busy: bool, target: str, end: str
) -> None:
    text = SCRIPT.format(
        **{"is_stop": is_stop, "stopped_s": stopped_s, "idle_s": idle_s, "target": target},
        process_time="time.monotonic" if is_busy else "lambda: 0.0",
        more="",
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "the last line\n"), done.stderr
    assert ("but not its thread uploads: " in done.stderr) == bool(end)
    assert end in done.stderr


def test_exit_functions_take_their_time() -> None:
    """The main thread counts as ended before they are called."""
    names = {"is_stop": True, "stopped_s": 0.2, "idle_s": 60, "target": "lambda: None"}
    text = SCRIPT.format(**names, process_time="time.monotonic", more=AT_EXIT)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "the last line\nthe last function\n")
    assert done.stderr == ""
