"""A job's program that is no script: it becomes a module, as by ``python -m``, or starts a command.

``program.py module FOLDER NAME ARGS…``: Python looks in FOLDER first, as ``python -m`` does in the
working directory; it is that folder's copy in the run.
``program.py command NAME ARGS…``: found by PATH, else beside this Python, as in an environment that
is not activated. This process lives as long as the command, and as a training that outlives it.
"""

import ctypes
import os
import re
import resource
import runpy
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOTICE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
AWAITED = (*NOTICE_SIGNALS, signal.SIGCHLD)


def run_module(folder: str, name: str, *args: str) -> None:
    """Run the module `name`, looked for in `folder` first, as ``__main__`` with arguments; raise
    ImportError without one, and whatever it raises."""
    sys.path.insert(0, folder)
    sys.argv[:] = [name, *args]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_command(name: str, *args: str) -> NoReturn:
    """Run a command in a child process, and end as it ends: with its exit code, or by its signal; a
    shell's code, 126 or 127, and a message where it can't be started.

    A notice is passed on to the command, and ends a shell around a training. The training then
    gets it, too, and saves: it is waited for, and its exit code counts.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent, command = os.getpid(), os.fork()
    if not command:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os._exit(_become(name, args))
    for notice in NOTICE_SIGNALS:  # blocked as they are: others see that this process lives on
        signal.signal(notice, lambda *_: None)
    status = _wait_for({command})[command]
    number = os.WTERMSIG(status)  # 0 for an exit
    if number in NOTICE_SIGNALS and (statuses := _wait_for_trainings(number)):
        status = next(filter(None, statuses), 0)
    _end_as(status)


def _become(name: str, args: Iterable[str]) -> int:
    """Replace this process by a command; print why it can't be started, and return a shell's
    code."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # as a script has it by python -u
    path = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable)) or name
    try:
        os.execvp(path, [name, *args])
    except OSError as error:
        print(f"hpc-ddp: {name} can't be started: {error.strerror}", file=sys.stderr, flush=True)
        return 127 if isinstance(error, FileNotFoundError) else 126


def _wait_for(processes: Set[int]) -> dict[int, int]:
    """Wait until children have ended, and pass on to them what `NOTICE_SIGNALS` come meanwhile;
    return the wait status of each. `AWAITED` have to be blocked."""
    statuses: dict[int, int] = {}
    while True:
        with suppress(ChildProcessError):  # none is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[ended[0]] = ended[1]
        running = processes - statuses.keys()
        if not running:
            return {process: statuses[process] for process in processes}
        number = signal.sigwait(AWAITED)
        if number != signal.SIGCHLD:
            _send(running, number)


def _send(children: Set[int], number: int) -> None:
    """Send a signal to children that have not been waited for."""
    for process in children:
        os.kill(process, number)


def _wait_for_trainings(number: int) -> list[int]:
    """Send a signal, which has ended the command, to what that leaves: shells, and the programs
    below them that handle it, as a training does. Wait for these; return their wait statuses."""
    while True:
        masks, parents = {}, set()
        for process, parent, caught in _processes():
            parents.add(parent)
            if parent == os.getpid():
                masks[process] = caught
        trainings = {process for process, caught in masks.items() if caught >> number - 1 & 1}
        shells = masks.keys() & parents - trainings
        _send(shells or trainings, number)
        statuses = _wait_for(shells or trainings)
        if not shells:  # what they leave are children of this process now
            return list(statuses.values())


def _processes() -> Iterator[tuple[int, int, int]]:
    """Yield each process's id, its parent's, and the mask of the signals that it handles; none
    where there is no /proc."""
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with suppress(OSError), open(f"/proc/{process}/status", errors="replace") as file:
            fields = dict(re.findall(r"^(PPid|SigCgt):\s*(\w+)$", file.read(), re.M))
            yield int(process), int(fields["PPid"]), int(fields["SigCgt"], 16)


def _end_as(status: int) -> NoReturn:
    """End this process as another one has ended, whose wait status is given."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that process has left one
        with suppress(OSError):  # SIGKILL
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    sys.exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, setting: int) -> None:
    """Set an option of this process; nothing on other systems than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, setting)


if __name__ == "__main__":
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # not with PYTHONSAFEPATH
        del sys.path[0]
    if sys.argv[1] == "module":
        run_module(*sys.argv[2:])
    else:
        run_command(*sys.argv[2:])
