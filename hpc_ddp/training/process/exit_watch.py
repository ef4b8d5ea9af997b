"""Ends a worker that has stopped, and that a thread of the script keeps alive.

Python waits at its exit for each thread that is no daemon. One that waits for what never comes, as
for an item of a queue, holds the job's nodes until the time limit. After the training's end that is
only said: the exit code of the script is not known, and a failed one must not seem to be finished.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.process import children_by_parent

STOPPED_S = 8.0  # after a stop, whose time is short, and after which the next start goes on
IDLE_S = 900.0  # after the end of the training: a thread may still upload, say
LOOK_EVERY_S = 1.0
BUSY_SHARE = 0.01  # of a processor

_stopped = threading.Event()
_watcher: threading.Thread | None = None  # one per process


def watch_exit(is_stop: bool) -> None:
    """Start a thread that acts where the script's main thread has ended, and others, which are no
    daemons, go on. It names them: after a stop (`is_stop`) after `STOPPED_S`, and it then ends the
    process with 0; else after `IDLE_S` in which the process has no children and uses less than
    `BUSY_SHARE` of a processor. A second call starts no thread, but may tell the first one's of a
    stop."""
    global _watcher
    if is_stop:
        _stopped.set()
    if _watcher is None:
        _watcher = threading.Thread(target=_watch, name="hpc-ddp exit watch", daemon=True)
        _watcher.start()


def _watch() -> None:
    """Wait for the main thread's end, and do as `watch_exit` says; run by the thread."""
    main = threading.main_thread()
    while main.is_alive():  # a join could be in the way of the interpreter's own
        time.sleep(LOOK_EVERY_S)
    is_stop = _stopped.is_set()
    limit_s = STOPPED_S if is_stop else IDLE_S
    idle_since, cpu_s = time.monotonic(), time.process_time()
    while time.monotonic() < idle_since + limit_s:
        time.sleep(limit_s / 10)
        names = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
        if not names:  # the exit goes on: its functions may take their time
            return
        is_busy = time.process_time() - cpu_s > BUSY_SHARE * limit_s
        if not is_stop and (is_busy or children_by_parent().get(os.getpid())):
            idle_since, cpu_s = time.monotonic(), time.process_time()
    end = "the process is ended" if is_stop else "it keeps the job's nodes; make it a daemon"
    say(f"the script has ended, but not its thread {', '.join(names)}: {end}")
    if is_stop:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
