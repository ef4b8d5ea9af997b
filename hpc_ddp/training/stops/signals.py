"""Signals and other signs that the attempt must end soon.

Under hpc-ddp's supervisor a SIGTERM can mean two things: the cluster wants the node back
(all ranks are alive and can save), or torchrun is clearing away the survivors of a crash
(a collective would hang). The supervisor knows which, and creates a file for the first.
Under a plain torchrun there is no supervisor, and SIGTERM itself is the notice.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.file_io import read_seconds, read_word
from hpc_ddp.core.journal.enums import StopReason
from hpc_ddp.core.process import LOCAL_NOTICE, NOTICE_SIGNALS, is_memory_file

NONE, CANCELLED, DEADLINE, NOTICE = range(4)  # ranks agree on the largest
REASONS = {
    CANCELLED: StopReason.CANCELLED,
    DEADLINE: StopReason.DEADLINE,
    NOTICE: StopReason.NOTICE,
}

# USR1 and USR2 are the warning signals of many job scripts, and HUP is that of a terminal. On
# clusters that signal every process of a step they arrive here too, and would kill by default.
SIGNALS = NOTICE_SIGNALS
WARNINGS = tuple(n for n in SIGNALS if n not in (signal.SIGTERM, signal.SIGINT))
WORD_S = 2.0  # the cluster may signal everybody before the supervisor has written its file
POLL_S = 1.0  # between two looks at the files
DISK_EVERY_S = 60.0
STALE_S = 10.0  # a supervisor without a beat for so long is not at work
AGAIN_S = 1.0  # a Ctrl-C within it is torchrun's copy of the first
TORN_DOWN = 143  # what a shell shows for a death by SIGTERM


class Notices:
    """Listens for notices, from `install` on.

    The signal handler does nothing; a thread does the rest, since the main thread may sit in a
    collective for as long as its peers like. The thread also looks at the files once a second, so a
    notice without a signal works, and no step ever reads a file.

    Parameters
    ----------
    notice
        the supervisor's file on the shared disk, None without a supervisor
    local_notice
        the file in the supervisor's memory: where it can be read, the shared disk is asked at a
        signal, and once in `DISK_EVERY_S`

    Attributes
    ----------
    reason
        `NONE` so far, or why the attempt must end: `CANCELLED` or `NOTICE`
    source
        the sender of the reason, such as a signal's name; None so far
    end_time
        when the attempt's time is over, in unix seconds: None without a limit, and on a rank that
        does not watch the time
    """

    def __init__(self, notice: Path | None, local_notice: Path | None = None) -> None:
        self.reason = NONE
        self.source: str | None = None
        self.end_time: float | None = None
        self._notice, self._local_notice = notice, local_notice
        self._disk_look_at = 0.0  # of the next look at the disk, on the monotonic clock
        self._end_time_file: Path | None = None
        self._cancelled: Path | None = None  # the file that is there once the run is cancelled
        self._ended = False
        self._first_s = 0.0  # when the first signal came, on the monotonic clock

    def install(self) -> None:
        """Take the signals over, and start a thread that listens; processes that are forked later
        have the signals as they were by default. Raise ValueError outside of the main thread."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.take_signals()
        os.register_at_fork(after_in_child=_give_back)
        threading.Thread(target=self._listen, name="hpc-ddp notices", daemon=True).start()

    def take_signals(self) -> None:
        """Take the signals over, also from a library that has handlers of its own; a SIGHUP that is
        ignored stays so. Raise ValueError outside of the main thread."""
        for number in SIGNALS:
            is_hang_up = number == signal.SIGHUP
            if not (is_hang_up and signal.getsignal(number) is signal.SIG_IGN):  # below nohup
                signal.signal(number, _flag)

    def watch_for_cancel(self, path: Path) -> None:
        """From now on, a file at `path` means that the run is cancelled; it may exist already."""
        self._cancelled, self._disk_look_at = path, 0.0
        self._look()

    def watch_end_time(self, end_time: float | None, path: Path) -> None:
        """Set `end_time`, in unix seconds, None without a limit. From now on another time is taken
        over from the file at `path`, or from the local notice, once Slurm gives one."""
        self.end_time, self._end_time_file, self._disk_look_at = end_time, path, 0.0
        self._look()

    def end(self, then_exit: bool) -> None:
        """Ignore the signals from now on, and let the thread end: the work is safe, and only the
        exit code could suffer.

        Ignored and not handled, because Python gives handled signals back to their deadly
        default a good while before the process is gone. Where no supervisor is there and the script
        has more to do (not `then_exit`), SIGTERM, SIGHUP (unless it was ignored before) and Ctrl-C
        are ordinary ones again. Raise ValueError outside of the main thread.
        """
        self._ended = True
        hears_hang_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._notice is None and not then_exit:
            for number in (signal.SIGTERM, *([signal.SIGHUP] if hears_hang_up else [])):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _listen(self) -> None:
        """Look at the files each second, and at each signal; run by the thread."""
        poll = select.poll()  # select.select knows no descriptor above 1,023
        poll.register(self._reader, select.POLLIN)
        while not self._ended:
            self._look()
            if not poll.poll(POLL_S * 1000):
                continue
            for number in self._reader.recv(4096):
                if number in SIGNALS:  # the socket gets all handled ones: SIGCHLD, for one
                    self._handle_signal(signal.Signals(number))

    def _handle_signal(self, number: signal.Signals) -> None:
        """Without a supervisor, take a signal for a notice, and print that; exit with 130 at a
        further Ctrl-C, more than `AGAIN_S` after the first signal.

        With one, wait for its notice in a file, while `_may_get_notice`. Where none comes, exit
        with `TORN_DOWN` at a SIGTERM or SIGINT, since a peer has failed; pass over `WARNINGS`.
        """
        if self._notice is None:
            again = time.monotonic() - self._first_s > AGAIN_S  # not torchrun's copy of a Ctrl-C
            if self.reason != NOTICE:
                self._first_s = time.monotonic()
                text = f"{number.name}: stops and saves after this step"
                say(text + ("; Ctrl-C again ends it at once" if number == signal.SIGINT else ""))
            elif number == signal.SIGINT and again:
                os._exit(128 + signal.SIGINT)
            self._note(NOTICE, number.name)
            return
        signalled_at, may_come = time.monotonic(), True
        while may_come and self.reason != NOTICE:
            may_come = self._may_get_notice(signalled_at)  # then look: a beat follows the notice
            self._look(is_signalled=True)
            time.sleep(0.02)
        if self.reason != NOTICE and number not in WARNINGS and not self._ended:
            say(f"{number.name} without a notice: a peer has failed; ending")
            os._exit(TORN_DOWN)

    def _may_get_notice(self, signalled_at: float) -> bool:
        """Return whether the supervisor's notice may still come for a signal at `signalled_at`, on
        the monotonic clock: for `WORD_S`, in which the supervisor was at work where its beat can be
        read, since it may wait for a disk that stands still."""
        fields = _read_local(self._local_notice) if self._local_notice else None
        now = fields.get("beat", 0.0) if fields else time.monotonic()
        return float(now) < signalled_at + WORD_S

    def _look(self, is_signalled: bool = False) -> None:
        """Take over the reason and the end time from the files of notice, cancel and end time;
        those absent or unreadable change nothing.

        The supervisor's local notice, which costs no disk, is read at each call. Where it can be
        read, the notice on the disk is read only at a signal for which there is no local one, and
        the files of cancel and end time once in `DISK_EVERY_S` seconds.
        """
        fields = _read_local(self._local_notice) if self._local_notice else None
        if fields and "source" in fields:
            self._note(NOTICE, str(fields["source"]))
        elif fields is None or is_signalled:
            text = read_word(self._notice) if self._notice and self.reason != NOTICE else ""
            if text:
                self._note(NOTICE, _source(text))
        if fields is None or time.monotonic() >= self._disk_look_at:
            self._disk_look_at = time.monotonic() + DISK_EVERY_S
            self._look_at_disk()
        if fields and "end_time" in fields and self._end_time_file is not None:
            self.end_time = float(fields["end_time"])

    def _look_at_disk(self) -> None:
        """Take over a cancel and the end time from their files, if they are there."""
        # os.path's: Path.exists raises for a disk that is in trouble.
        if self._cancelled is not None and self.reason == NONE and os.path.exists(self._cancelled):
            self._note(CANCELLED, "cancelled")
        if self._end_time_file is not None:
            self.end_time = read_seconds(self._end_time_file) or self.end_time

    def _note(self, reason: int, source: str) -> None:
        """Set the reason and its source, unless there is one as urgent."""
        if reason > self.reason:
            self.source, self.reason = source, reason


def _flag(number: int, frame: FrameType | None) -> None:
    """Do nothing: that a handler exists makes Python write the number to the wake-up socket."""


def _give_back() -> None:
    """In a forked child: stop writing to the parent's socket, and give the signals their default
    effect again."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is _flag:
            signal.signal(number, signal.SIG_DFL)


def ignore_notices() -> None:
    """Have this process, which a rank has forked, ignore the signals of a notice: the rank needs
    it until the rank itself stops. Loader workers call it; a script does for its own processes,
    such as environments (``Pool(4, initializer=ignore_notices)``).

    Start a thread that ends the process at a SIGTERM of its parent: multiprocessing sends one to
    end a worker, and then waits without limit. Programs that the worker starts outlive a notice,
    too, so their `Popen.terminate` kills them: a SIGTERM would not reach them.
    """
    for number in (signal.SIGINT, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # which programs inherit
    setattr(subprocess.Popen, "terminate", subprocess.Popen.kill)  # noqa: B010  (for mypy)
    parent = multiprocessing.parent_process()  # of a fork server's child that isn't its getppid
    pid = os.getppid() if parent is None else parent.pid
    threading.Thread(target=_exit_at_sigterm_of, args=(pid,), daemon=True).start()


def _exit_at_sigterm_of(parent: int) -> None:
    """Wait for a SIGTERM of the process `parent`, a PID, and exit with 0. Consume SIGTERMs of other
    processes, which have no effect."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _read_local(path: Path) -> dict[str, Any] | None:
    """Return the fields of the supervisor's local notice at `path`; {} for a text that is not a
    whole JSON object, None where it can't be read, or had no beat for `STALE_S`."""
    try:
        if not is_memory_file(path, LOCAL_NOTICE):  # another PID namespace: a read may never end
            return None
        fields = json.loads(path.read_text() or "{}")
    except OSError:
        return None
    except ValueError:
        return {}
    if not isinstance(fields, dict):
        return {}
    return fields if time.monotonic() - fields.get("beat", 0.0) < STALE_S else None


def _source(text: str) -> str:
    """Return the ``source`` of a notice file's text, a JSON object, or "notice" where the object
    has none. Return another JSON value as a text, and of a text that is no JSON the first 100
    characters."""
    try:
        value = json.loads(text)
    except ValueError:
        return text[:100]
    return str(value.get("source", "notice")) if isinstance(value, dict) else str(value)
