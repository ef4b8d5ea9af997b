"""Signals and other signs that the attempt must end soon.

Under hpc-ddp's supervisor a SIGTERM can mean two things: the cluster wants the node back
(all ranks are alive and can save), or torchrun is clearing away the survivors of a crash
(a collective would hang). The supervisor knows which, and writes a file in the first case.
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
WORD_S = 2.0  # the wait for the supervisor's file: the cluster may signal all processes before
POLL_S = 1.0  # between two reads of the files
DISK_EVERY_S = 60.0  # between two reads of files on the disk, if the local notice can be read
STALE_S = 10.0  # a supervisor without a beat for so long is not at work
AGAIN_S = 1.0  # a Ctrl-C within this time is torchrun's copy of the first
TORN_DOWN = 143  # a shell's code for a death by SIGTERM


class Notices:
    """Listens for notices, from `install` on.

    The signal handler does nothing; a thread acts on signals, since the main thread may wait in a
    collective for a long time. The thread also reads the files once a second, so a notice without
    a signal works, and no step ever reads a file.

    Parameters
    ----------
    notice
        the supervisor's file on the shared disk, None without a supervisor
    local_notice
        the file in the supervisor's memory: while it can be read, files on the shared disk are read
        only at a signal, and once in `DISK_EVERY_S` seconds

    Attributes
    ----------
    reason
        why the attempt must end: `CANCELLED` or `NOTICE`; `NONE` at first
    source
        the sender of the reason, such as a signal's name; None at first
    end_time
        when the attempt's time is over, in unix seconds: None without a limit, and on a rank that
        does not watch the time
    """

    def __init__(self, notice: Path | None, local_notice: Path | None = None) -> None:
        self.reason = NONE
        self.source: str | None = None
        self.end_time: float | None = None
        self._notice, self._local_notice = notice, local_notice
        self._disk_look_at = 0.0  # when to read the disk's files next, on the monotonic clock
        self._end_time_file: Path | None = None
        self._cancelled: Path | None = None  # exists once the run is cancelled
        self._ended = False
        self._first_s = 0.0  # when the first signal came, on the monotonic clock

    def install(self) -> None:
        """Set handlers of `SIGNALS` and the wake-up socket of Python's signals, and start a thread
        that listens. Processes that are forked later have the signals' default effects. Raise
        ValueError outside of the main thread."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.take_signals()
        os.register_at_fork(after_in_child=_release_signals)
        threading.Thread(target=self._listen, name="hpc-ddp notices", daemon=True).start()

    def take_signals(self) -> None:
        """Set handlers of `SIGNALS` that only wake the thread, also in place of a library's; a
        SIGHUP that is ignored stays so. Raise ValueError outside of the main thread."""
        for number in SIGNALS:
            is_hang_up = number == signal.SIGHUP
            if not (is_hang_up and signal.getsignal(number) is signal.SIG_IGN):  # under nohup
                signal.signal(number, _do_nothing)

    def watch_for_cancel(self, path: Path) -> None:
        """Watch for a file at `path`, which means that the run is cancelled; it may exist already.
        Read all files once now."""
        self._cancelled, self._disk_look_at = path, 0.0
        self._read_files()

    def watch_end_time(self, end_time: float | None, path: Path) -> None:
        """Set `end_time`, in unix seconds, None without a limit. From now on replace it by a later
        change of Slurm's, from the file at `path` or the local notice. Read all files once now."""
        self.end_time, self._end_time_file, self._disk_look_at = end_time, path, 0.0
        self._read_files()

    def end(self, then_exit: bool) -> None:
        """Ignore the signals from now on, and have the thread end: the work is safe, and a signal
        could only change the exit code. But without a supervisor, if the script has more to do (not
        `then_exit`), SIGTERM, SIGHUP (unless it was ignored before) and Ctrl-C have their default
        effects again. Raise ValueError outside of the main thread.

        They are ignored, not handled, since Python gives handled signals their deadly default
        effects again some time before the process is gone.
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
        """Read the files each second, and handle each signal, until `end`; run by the thread."""
        poll = select.poll()  # select.select knows no descriptor above 1,023
        poll.register(self._reader, select.POLLIN)
        while not self._ended:
            self._read_files()
            if not poll.poll(POLL_S * 1000):
                continue
            for number in self._reader.recv(4096):
                if number in SIGNALS:  # the socket gets all signals with a handler, as SIGCHLD
                    self._handle_signal(signal.Signals(number))

    def _handle_signal(self, number: signal.Signals) -> None:
        """Handle a signal: by `_take_as_notice` without a supervisor. With a supervisor wait for
        its notice in a file, while `_may_get_notice`. If none comes, print that and end the process
        with `TORN_DOWN` for a SIGTERM or SIGINT, since a peer has failed; pass over `WARNINGS`."""
        if self._notice is None:
            self._take_as_notice(number)
            return
        signalled_at, may_come = time.monotonic(), True
        while may_come and self.reason != NOTICE:
            # In this order: a supervisor writes its notice first, and its beat afterwards.
            may_come = self._may_get_notice(signalled_at)
            self._read_files(is_signalled=True)
            time.sleep(0.02)
        if self.reason != NOTICE and number not in WARNINGS and not self._ended:
            say(f"{number.name} without a notice: a peer has failed; ending")
            os._exit(TORN_DOWN)

    def _take_as_notice(self, number: signal.Signals) -> None:
        """Note a signal as a notice, and print a line for the first one. End the process with 130
        at a further Ctrl-C, more than `AGAIN_S` after the first signal."""
        is_another = time.monotonic() - self._first_s > AGAIN_S  # not torchrun's copy of a Ctrl-C
        if self.reason != NOTICE:
            self._first_s = time.monotonic()
            text = f"{number.name}: stops and saves after this step"
            say(text + ("; Ctrl-C again ends it at once" if number == signal.SIGINT else ""))
        elif number == signal.SIGINT and is_another:
            os._exit(128 + signal.SIGINT)
        self._note_reason(NOTICE, number.name)

    def _may_get_notice(self, signalled_at: float) -> bool:
        """Return whether the supervisor's notice may still come for a signal at `signalled_at`, on
        the monotonic clock: until `WORD_S` after the signal. If the supervisor's beat can be read,
        its time counts in place of the present one, since a supervisor may wait for a disk."""
        fields = _read_local(self._local_notice) if self._local_notice else None
        beat = fields.get("beat", 0.0) if fields else time.monotonic()
        return float(beat) < signalled_at + WORD_S

    def _read_files(self, is_signalled: bool = False) -> None:
        """Set the reason and the end time from the files of notice, cancel and end time; a file
        that is absent or unreadable changes nothing.

        The supervisor's local notice, which costs no disk, is read at each call. If it can be read,
        the notice on the disk is read only at a signal (`is_signalled`) without a local notice, and
        the files of cancel and end time once in `DISK_EVERY_S` seconds.
        """
        fields = _read_local(self._local_notice) if self._local_notice else None
        if fields and "source" in fields:
            self._note_reason(NOTICE, str(fields["source"]))
        elif fields is None or is_signalled:
            text = read_word(self._notice) if self._notice and self.reason != NOTICE else ""
            if text:
                self._note_reason(NOTICE, _source_of(text))
        if fields is None or time.monotonic() >= self._disk_look_at:
            self._disk_look_at = time.monotonic() + DISK_EVERY_S
            self._read_disk_files()
        if fields and "end_time" in fields and self._end_time_file is not None:
            self.end_time = float(fields["end_time"])

    def _read_disk_files(self) -> None:
        """Note a cancel, and set the end time, from their files, if these exist."""
        # os.path.exists, since Path.exists raises OSError for a disk in trouble.
        if self._cancelled is not None and self.reason == NONE and os.path.exists(self._cancelled):
            self._note_reason(CANCELLED, "cancelled")
        if self._end_time_file is not None:
            self.end_time = read_seconds(self._end_time_file) or self.end_time  # None: no file

    def _note_reason(self, reason: int, source: str) -> None:
        """Set the reason and its source, if it is more urgent than the present reason."""
        if reason > self.reason:
            self.source, self.reason = source, reason


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing. For a signal with a handler Python writes the number to the wake-up socket."""


def _release_signals() -> None:
    """Give the signals their default effects again in a forked child, and end its writes to the
    parent's socket."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, signal.SIG_DFL)


def ignore_notices() -> None:
    """Have this process, a child of a rank, ignore the signals of a notice: the rank needs it until
    the rank itself stops. Loader workers call it; a script calls it in its own processes, such as
    environments (``Pool(4, initializer=ignore_notices)``).

    SIGTERM is blocked, and a thread ends the process, with code 0, at a SIGTERM of its parent:
    multiprocessing sends one to end a worker, and then waits without limit. Programs that this
    process starts outlive a notice, too. A SIGTERM would not reach them, so in this process
    `Popen.terminate` kills. Raise ValueError outside of the main thread.
    """
    for number in (signal.SIGINT, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # inherited by programs
    setattr(subprocess.Popen, "terminate", subprocess.Popen.kill)  # noqa: B010  (for mypy)
    # In a fork server's child getppid would be the server.
    parent = multiprocessing.parent_process()
    pid = os.getppid() if parent is None else parent.pid
    threading.Thread(target=_exit_at_sigterm_of, args=(pid,), daemon=True).start()


def _exit_at_sigterm_of(parent: int) -> None:
    """Wait for a SIGTERM of the process `parent`, a PID, and end this process with 0. A SIGTERM of
    another process has no effect; it is consumed."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _read_local(path: Path) -> dict[str, Any] | None:
    """Return the fields of the supervisor's local notice at `path`: ``beat``, a monotonic time,
    and perhaps ``source`` and ``end_time``. Return {} for a text that is not a whole JSON object;
    None if the file can't be read, or had no beat for `STALE_S`."""
    try:
        # In another PID namespace the path leads to another file, whose read may never end.
        if not is_memory_file(path, LOCAL_NOTICE):
            return None
        fields = json.loads(path.read_text() or "{}")
    except OSError:
        return None
    except ValueError:
        return {}
    if not isinstance(fields, dict):
        return {}
    return fields if time.monotonic() - fields.get("beat", 0.0) < STALE_S else None


def _source_of(text: str) -> str:
    """Return the ``source`` of a notice file's text, a JSON object; "notice" if the object has
    none. Return another JSON value as a text, and of a text that is no JSON the first 100
    characters."""
    try:
        fields = json.loads(text)
    except ValueError:
        return text[:100]
    return str(fields.get("source", "notice")) if isinstance(fields, dict) else str(fields)
