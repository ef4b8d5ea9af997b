"""The signals of a supervisor, which also wake its loop."""

from __future__ import annotations

import select
import signal
import socket
import time
from types import FrameType

from hpc_ddp.core.process import NOTICE_SIGNALS

LATE_S = 0.3  # how much later than its child this process may get a signal to the whole step


class Signals:
    """Notes signals, and wakes the loop. A handler that did more could run at any moment."""

    def __init__(self) -> None:
        """Handle the `NOTICE_SIGNALS` and SIGCHLD of this process from now on: each wakes `wait`,
        by the process's wake-up descriptor, and the number of a notice signal is added to `seen`,
        which its reader empties. The `NOTICE_SIGNALS` are unblocked, since a dry run starts this
        process with them blocked."""
        self.seen: list[int] = []
        self._read, self._write = socket.socketpair()  # kept: the descriptors must stay open
        self._read.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (*NOTICE_SIGNALS, signal.SIGCHLD):
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICE_SIGNALS)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: add its number to `seen`, unless it is SIGCHLD, which only wakes
        `wait`."""
        if number != signal.SIGCHLD:
            self.seen.append(number)

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a signal comes, also SIGCHLD. Return at once if a signal
        has come since the last call."""
        if select.select([self._read], [], [], seconds)[0]:
            self._read.recv(4096)  # a byte for each signal, written by Python

    def take(self) -> str:
        """Return the name of the first signal in `seen`, '' for none; empty `seen`."""
        name = signal.Signals(self.seen[0]).name if self.seen else ""
        self.seen.clear()
        return name

    def wait_for_late_notice(self, code: int) -> None:
        """Return once a notice signal is in `seen`, or after `LATE_S`; at once where the exit code
        `code` of a child, as Popen gives it, is that of no notice signal."""
        give_up = time.monotonic() + LATE_S
        while -code in NOTICE_SIGNALS and not self.seen and time.monotonic() < give_up:
            self.wait(LATE_S)  # SIGCHLD ends it, too
