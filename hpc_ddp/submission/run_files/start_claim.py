"""The claim that a start of a run has on it, so that no other process starts it meanwhile."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_folder import RunFolder

_claims: dict[Path, int] = {}  # descriptors of the files that this process has locked, by run


def claim_start(run: RunFolder) -> None:
    """Lock the file ``.start`` in a run's folder, so that no other process starts the run, until
    `release_start` or this process's end. A claim that this process has already is made anew.

    Raise UsageError where another process has the claim, and OSError where the file can't be made.
    On a file system that shares no locks between machines only processes of this machine are kept
    away; on one without locks, none.
    """
    release_start(run)
    claim = os.open(run.path / ".start", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(claim)
        raise UsageError(
            f"run {run.path} is being started by another process just now",
            hint=f"hpc-ddp status {run.quoted}",
        ) from None
    except OSError:  # no locks here: what the journal says has to do
        pass
    _claims[run.path] = claim


def release_start(run: RunFolder) -> None:
    """Let other processes start a run again; do nothing where this process has no claim on it."""
    if run.path in _claims:
        os.close(_claims.pop(run.path))
