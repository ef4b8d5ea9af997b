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
    ("is_stop", "stopped_s", "idle_s", "is_busy", "target", "is_ended"),
    [
        (True, 0.2, 60, False, NEVER, True),
        (False, 60, 0.2, False, NEVER, True),
        (True, 0.2, 60, True, NEVER, True),
        (False, 60, 0.2, True, SOON, False),
        (False, 60, 0.2, False, HAS_CHILD, False),
        (False, 60, 60, False, SOON, False),
    ],
    ids=["stopped", "idle", "busy after a stop", "busy", "a child", "soon over"],
)
def test_a_thread_keeps_a_worker_only_while_it_works(
    is_stop: bool, stopped_s: float, idle_s: float, is_busy: bool, target: str, is_ended: bool
) -> None:
    text = SCRIPT.format(
        **{"is_stop": is_stop, "stopped_s": stopped_s, "idle_s": idle_s, "target": target},
        process_time="time.monotonic" if is_busy else "lambda: 0.0",
        more="",
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "the last line\n"), done.stderr
    assert ("but not its thread uploads: the process is ended" in done.stderr) is is_ended


@pytest.mark.parametrize(
    ("target", "more", "code", "last_line"),
    [
        ("lambda: None", AT_EXIT, 0, "the last function"),
        (NEVER, "import atexit; atexit.register(print, 'not reached'); 1 / 0", 1, ""),
    ],
    ids=["exit functions take their time", "an exception"],
)
def test_an_exit_keeps_its_functions_and_its_code(
    target: str, more: str, code: int, last_line: str
) -> None:
    text = SCRIPT.format(
        **{"is_stop": True, "stopped_s": 0.2, "idle_s": 60, "target": target},
        process_time="time.monotonic",
        more=more,
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50)
    assert done.returncode == code, done.stderr
    assert done.stdout.endswith(f"{last_line}\n" if last_line else "")
    assert ("the process is ended" in done.stderr) == (not last_line)
