"""The claim of a start on its run: no other process starts the run meanwhile."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_folder import RunFolder

_claims: dict[Path, int] = {}  # by a run's folder: the descriptor of the file that is locked here


def claim_start(run: RunFolder) -> None:
    """Lock the file ``.start`` in a run's folder, which is made if it is missing, so that no other
    process starts the run until `release_start` or this process's end. A claim that this process
    has already is made anew.

    Raise UsageError where another process has the claim, and OSError where the file can't be made.
    A file system that shares no locks between machines keeps only processes of this machine away;
    on one without locks the claim has no effect.
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
    except OSError:  # no locks here: `check_idle` reads the journal, which has to do
        pass
    _claims[run.path] = claim


def release_start(run: RunFolder) -> None:
    """Let other processes start a run again. Without a claim of this process nothing is done."""
    if run.path in _claims:
        os.close(_claims.pop(run.path))
