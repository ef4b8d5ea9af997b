"""How a worker prints, and how it ends early: report it once, and be gone.

After an error an ordinary exit would wait for the process group, and that for peers which may
never come. After a stop it would take torch apart object by object, a second or more of a grace
time that may be short.
"""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import textwrap
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any

from hpc_ddp.core.errors import EARLY_EXIT, HpcDdpError
from hpc_ddp.core.journal.events import RankFailed
from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.training.checkpoint.save import SupersededError
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.process.environment import DistEnv


class _LossyFile(io.FileIO):
    """A file that loses text where the disk refuses it, in place of an error."""

    def write(self, data: Any) -> int:
        """Write bytes, and return their number. If the disk refuses, they are lost, and count as
        written."""
        try:
            return super().write(data)
        except OSError:  # the text is lost
            return memoryview(data).nbytes


def drop_failing_prints() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that lose text where the disk, which
    holds the log under hpc-ddp, refuses it: a print raises no error then. A stream of the script's
    own in their place is left alone."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        if old is not getattr(sys, f"__{name}__"):
            continue
        # TextIOWrapper takes a raw file too, as under `python -u`: nothing waits in a buffer.
        raw: Any = _LossyFile(number, "wb", closefd=False)
        new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)
        with suppress(OSError):
            old.flush()
        setattr(sys, name, new)


class OuterError:
    """The exception in whose ``except`` block a training has begun, if any: its end is not that of
    the training."""

    def __init__(self) -> None:
        """Note the exception that is being handled now."""
        self._error = sys.exc_info()[1]

    def has_inner(self) -> bool:
        """Return whether another exception is being handled now: then it ends the script."""
        error = sys.exc_info()[1]
        return error is not None and error is not self._error


class FailureHook:
    """A ``sys.excepthook`` that journals an error, prints it, and ends the process without a
    teardown.

    `journal` and `position` are None until the run's folder is known, and `info` and `node` may
    follow later. The exit code is 1, or an HpcDdpError's own. ``sys.exit(n)`` does not pass here
    and keeps its code.
    """

    def __init__(self, info: DistEnv | None = None, node: str = "") -> None:
        """Note that this process, not a fork of it, is the rank `info` on the node `node`."""
        self.journal: Journal | None = None
        self.position: Position | None = None
        self.info, self.node = info or DistEnv(), node
        self._is_reported = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Become ``sys.excepthook``, and enable faulthandler, unless it is: a signal that ends the
        process in compiled code, as SIGSEGV, then prints the Python stacks. Call `install` again
        after init_process_group: it puts torch's hook around this one, which would hold back the
        text that this one prints."""
        sys.excepthook = self
        if not faulthandler.is_enabled():
            faulthandler.enable(2)  # the descriptor: sys.stderr may have none, as in a notebook

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report an error, of class `kind` and with the traceback `trace`, and exit at once with 1,
        or with an HpcDdpError's own code. In a forked process only print it."""
        if self.is_forked:
            sys.__excepthook__(kind, error, trace)
            return
        code = error.exit_code if isinstance(error, HpcDdpError) else 1
        try:
            self.report(error, "".join(traceback.format_exception(kind, error, trace)))
        finally:
            # torch's hook, around this one until `install` is called again, has put a StringIO in
            # place of stderr, and would print its text once this hook returned.
            if isinstance(sys.stderr, io.StringIO):
                with suppress(OSError):
                    os.write(2, sys.stderr.getvalue().encode())
            os._exit(code)

    def report(self, error: BaseException, text: str) -> None:
        """Journal an error with the traceback `text`, write it for torchrun, and print it. Do
        nothing if this hook has reported an error already. A disk that refuses is passed over; an
        OSError of a stream that the script has put in place of stdout or stderr comes through."""
        if self._is_reported:
            return
        self._is_reported = True
        self._journal_error(error, text)
        _report_to_torchrun(error)
        self._print_error(error, text)
        sys.stdout.flush()
        sys.stderr.flush()

    def note_early_exit(self) -> None:
        """Journal that the rank's script has ended by itself without `Run.finish`, and wait for the
        disk."""
        self._journal_failure(EARLY_EXIT, "")

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the rank's, as of a loader: it is no rank, and what
        ends it, or a thread of it, is no failure of the run."""
        return os.getpid() != self._pid

    def _journal_error(self, error: BaseException, text: str) -> None:
        """Journal an error, of which `text` is the traceback, and wait for the disk. Do nothing
        without a journal, or for a SupersededError."""
        # A superseded attempt writes nothing: the files belong to its successor.
        if isinstance(error, SupersededError):
            return
        line = traceback.format_exception_only(error)[-1].strip()
        if "in DataLoader worker process" in line:  # the message holds the worker's traceback
            line = line.splitlines()[-1]  # the worker's own error
        self._journal_failure(line, text)

    def _journal_failure(self, line: str, text: str) -> None:
        """Journal the rank's failure by a line and the traceback `text` ("" for none), and wait for
        the disk. Do nothing without a journal."""
        if self.journal is not None:
            step = self.position.step if self.position else None
            self.journal.write(RankFailed(self.info.rank, self.node, step, line, text))
            self.journal.drain()

    def _print_error(self, error: BaseException, text: str) -> None:
        """Print an error to stderr: an HpcDdpError's message and hint, else the traceback
        `text`."""
        if isinstance(error, HpcDdpError):
            text = f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")
        if self.info.world_size > 1:  # they may all write to one terminal
            text = textwrap.indent(text, f"[rank{self.info.rank}]: ", lambda line: True)
        sys.stderr.write(text)


def _report_to_torchrun(error: BaseException) -> None:
    """Write the error into the file that TORCHELASTIC_ERROR_FILE names, where torchrun's summary of
    a failure looks for it. Do nothing without that variable; a file that can't be written is passed
    over."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # the handler asks Python for the traceback of the error being handled
    except BaseException as raised:
        with suppress(OSError):  # the disk is full, say
            get_error_handler().record_exception(raised)
