"""Errors that a person reads.

::

    HpcDdpError          something failed                     exit 1
    ├── UsageError       what was asked for can't be done     exit 2
    └── DiskError        a disk does not answer               exit 75
    HpcDdpWarning        a job is probably not what was meant
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Exit code (EX_TEMPFAIL): of a job, it stopped, can go on, and was not requeued; of a worker, what
# failed may succeed in another attempt.
CAN_GO_ON = 75

# The errors of a rank whose peer has gone. They follow from another failure, if there is one.
COMMUNICATION_ERROR = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|NCCL|[Gg]loo|ProcessGroup|c10d"
    r"|Dist(Network|Backend|Store)Error|Rendezvous|Timed out waiting|heartbeat"
)
# Errors of ranks that called different collectives: no peer has gone, and they come again.
MISMATCH = re.compile(
    r"collective mismatch|mismatch between collectives|op\.preamble\.length <= op\.nbytes"
)
# As the journal has a rank that leaves the loop by itself, with any exit code.
EARLY_EXIT = "the script ended without run.finish()"
# As a verdict names the end of a process whose code a shell around it, or the script, has changed.
HIDDEN_EXIT = "exit code 0 before the end of the training, which hides a failure"
# What argparse and click print of a wrong call, and hpc-ddp of its own errors, without a traceback.
ERROR_LINE = re.compile(r"^(?:\S+: )?[Ee]rror: (?P<text>.+)(\nhint: (?P<hint>.+))?", re.M)


class HpcDdpError(Exception):
    """One sentence on what was wrong, and a hint: one thing to do about it (None: no hint).

    The message names the bad value and the accepted ones, starts in lower case and has
    no full stop, so that it reads well behind ``error:``.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(HpcDdpError):
    """The request itself is wrong: an option, a file, a value."""

    exit_code = 2


class DiskError(HpcDdpError):
    """A disk that was waited for does not answer; in another attempt it may."""

    exit_code = CAN_GO_ON


class HpcDdpWarning(UserWarning):
    """One sentence on a job that starts, but is probably not what was meant. `hpc_ddp.submit` warns
    by it in place of what the command line prints behind ``warning:``."""


def closest(value: str, accepted: Iterable[str], alike: float = 0.6) -> str:
    """Return ``, did you mean 'x'?`` for the accepted word nearest to `value`; '' where none is
    near. `alike` is the least likeness that counts as near, from 0 to 1 (difflib's ratio)."""
    import difflib  # on the error path only

    near = difflib.get_close_matches(value, list(accepted), n=1, cutoff=alike)
    return f", did you mean {near[0]!r}?" if near else ""
