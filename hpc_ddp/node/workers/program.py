"""Runs a job's program that is no script: a module, as by ``python -m``, or a command.

``program.py module FOLDER NAME ARGS…``: Python looks for the module in FOLDER first, the run's copy
of the working directory, in which ``python -m`` looks first.
``program.py command NAME ARGS…``: the command is looked for by PATH, then beside this Python, as in
an environment that is not activated. This process lives as long as the command, and as a training
that outlives the command.
"""

import ctypes
import os
import re
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
NOTICE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
AWAITED = (*NOTICE_SIGNALS, signal.SIGCHLD)
NOTICE_S = 1.0  # Slurm signals the processes of a step one after the other
POLL_S = 0.1  # where there is no sigtimedwait
REST_S = 60.0  # for what else runs when a training has ended: another one that saves, or a helper


def run_module(folder: str, name: str, *args: str) -> None:
    """Run the module `name` as ``__main__`` with the arguments `args`; Python looks for modules in
    `folder` first. Raise ImportError where there is no such module, and what the module raises."""
    sys.path.insert(0, folder)
    sys.argv[:] = [name, *args]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_command(name: str, *args: str) -> NoReturn:
    """Run the command `name` with `args` in a child process, and end this process as the command
    ends: with the same exit code, or by the same signal. Where the command can't be started, print
    the reason, and end with a shell's code, 126 or 127.

    A signal of notice is passed on to the command. If the command is a shell around a training, the
    notice ends the shell; the training then gets the notice, too, and this process waits until the
    training has ended. If the training fails, its exit code counts.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no child can be waited for
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent, command = os.getpid(), os.fork()
    if not command:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os._exit(_replace_process(name, args))
    for number in NOTICE_SIGNALS:  # blocked already; a handler shows others that this one survives
        signal.signal(number, lambda *_: None)
    tree = ProcessTree()
    tree.wait_for_one_of({command})
    status = tree.statuses[command]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in NOTICE_SIGNALS and not tree.notice:
        tree.await_notice()  # the command got it first
    training_statuses = tree.wait_for_trainings() if tree.notice else []
    _end_as(next(filter(None, training_statuses), status))  # the first that is not 0


def _replace_process(name: str, args: Iterable[str]) -> int:
    """Replace this process by the command `name` with `args`, looked for by PATH, then beside this
    Python. The command has PYTHONUNBUFFERED=1 unless the job sets that variable. Return only where
    the command can't be started: print the reason, and return a shell's exit code, 127 where the
    command or its interpreter does not exist, else 126."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # as a script has it by python -u
    path = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable)) or name
    try:
        os.execvp(path, [name, *args])
    except OSError as error:
        print(f"hpc-ddp: {name} can't be started: {error.strerror}", file=sys.stderr, flush=True)
        return 127 if isinstance(error, FileNotFoundError) else 126


class ProcessTree:
    """The processes below this one, and the notice for them. The signals `AWAITED` have to be
    blocked in this process.

    `notice` is the number of the newest signal of notice, 0 without one; `statuses` are the wait
    statuses, by process id, of children that have ended.
    """

    def __init__(self) -> None:
        self.notice = 0
        self.statuses: dict[int, int] = {}
        self._is_for_all = False  # the notice's sender has signalled each process below, too
        self._signalled: set[int] = set()  # ids of processes that have got the notice

    def wait_for_one_of(self, children: Set[int], limit_s: float = 3e6) -> bool:
        """Wait until one of `children` (process ids) has ended, at most `limit_s` seconds; return
        whether one has. Each notice that comes meanwhile is passed on to `children`, unless its
        sender has signalled all processes."""
        give_up = time.monotonic() + limit_s
        while True:
            with suppress(ChildProcessError):  # no child is left
                while (pair := os.waitpid(-1, os.WNOHANG))[0]:  # id and status; id 0: none yet
                    self.statuses[pair[0]] = pair[1]
            if not children.isdisjoint(self.statuses):
                return True
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                return False
            if self._take_signal(left_s) and not self._is_for_all:
                self._send_notice(children)

    def await_notice(self) -> None:
        """Wait until this process gets a notice, `NOTICE_S` at most; `notice` then has its
        number."""
        give_up = time.monotonic() + NOTICE_S
        while not self.notice and (left_s := give_up - time.monotonic()) > 0:
            self._take_signal(left_s)

    def wait_for_trainings(self) -> list[int]:
        """Pass the notice on to the processes that a command leaves: shells, which the notice ends,
        and programs that handle or ignore the notice, as a training does. Wait for all of them;
        return the wait statuses of the programs that have ended.

        Once a program has ended, this stops waiting if none of the others ends for `REST_S`: they
        may be helpers that go on. At last the notice goes to the other children, which it ends.
        """
        trainings: set[int] = set()
        while True:
            shells, survivors, _ = self._children()
            trainings |= survivors
            awaited = shells | survivors
            if not self._is_for_all:
                self._send_notice(awaited - self._signalled)
            limit_s = 3e6 if trainings.isdisjoint(self.statuses) else REST_S  # 3e6 s: a month
            if not awaited or not self.wait_for_one_of(awaited, limit_s):
                break
        if not self._is_for_all:
            self._send_notice(self._children()[2])
        return [self.statuses[process] for process in trainings if process in self.statuses]

    def _take_signal(self, limit_s: float) -> bool:
        """Wait for a signal of `AWAITED`, `limit_s` at most. Return whether a notice has come;
        `notice` then has its number. The end of a child, SIGCHLD, also ends the wait."""
        if sys.platform != "linux":
            if not (pending := signal.sigpending() & {*AWAITED}):
                time.sleep(min(limit_s, POLL_S))
                return False
            number, sender = signal.sigwait(pending), os.getppid()
        elif report := signal.sigtimedwait(AWAITED, limit_s):
            number, sender = report.si_signo, report.si_pid
        else:
            return False
        if number == signal.SIGCHLD:
            return False
        self.notice, self._is_for_all = number, _signals_all(sender)
        return True

    def _send_notice(self, processes: Set[int]) -> None:
        """Send the notice to those of `processes` that have not ended; all count as signalled from
        now on."""
        self._signalled |= processes
        for process in processes - self.statuses.keys():
            with suppress(ProcessLookupError):
                os.kill(process, self.notice)

    def _children(self) -> tuple[set[int], set[int], set[int]]:
        """Return the ids of this process's children as three sets: children that the notice ends
        and that have children themselves, as shells; children that handle or ignore the notice; and
        the others, which the notice ends."""
        survivors: set[int] = set()
        mortals: set[int] = set()
        parents: set[int] = set()
        for process, parent, mask in _processes():
            parents.add(parent)
            if parent == os.getpid():
                is_survivor = mask >> self.notice - 1 & 1  # the mask's bit 0 is signal 1
                (survivors if is_survivor else mortals).add(process)
        return mortals & parents, survivors, mortals - parents


def _processes() -> Iterator[tuple[int, int, int]]:
    """Yield for each process of this machine its id, its parent's id, and the mask of the signals
    that it handles or ignores. Yield nothing where there is no /proc."""
    if not os.path.isdir("/proc"):
        return
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{process}/status", errors="replace") as file:
            fields = dict(re.findall(r"^(PPid|SigCgt|SigIgn):\s*(\w+)$", file.read(), re.M))
            mask = int(fields["SigCgt"], 16) | int(fields["SigIgn"], 16)
            yield int(process), int(fields["PPid"]), mask


def _signals_all(sender: int) -> bool:
    """Return whether the process with the id `sender` signals all processes of a worker at once, as
    torchrun's agent does, and Slurm. True for the id 0, which stands for a process that a container
    hides: it may be Slurm."""
    if not sender or str(sender) == os.environ.get("HPC_DDP_AGENT_PID"):
        return True
    with suppress(OSError), open(f"/proc/{sender}/comm", errors="replace") as file:
        return file.read().startswith("slurmstepd")
    return False


def _end_as(status: int) -> NoReturn:
    """End this process as the process with the wait status `status` has ended: by the same signal,
    without a core of its own, or with the same exit code."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _prctl(PR_SET_DUMPABLE, 0)  # the other process has left a core, and one is enough
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])  # here the signal ends this process
    sys.exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, setting: int) -> None:
    """Set an option of this process by prctl(2); do nothing on other systems than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, setting)


if __name__ == "__main__":
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # not with PYTHONSAFEPATH
        del sys.path[0]
    if sys.argv[1] == "module":
        run_module(*sys.argv[2:])
    else:
        run_command(*sys.argv[2:])
