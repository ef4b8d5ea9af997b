"""What a run has printed."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpc_ddp.report.evidence import is_by_hand
from hpc_ddp.run.errors import UsageError
from hpc_ddp.run.folder import RunFolder

POLL_S = 0.5
ASK_EVERY = 20  # polls between two questions to Slurm whether the run has ended


def log_files(run: RunFolder, rank: int | None, attempt: int | None) -> list[Path]:
    """Return the files to show: the job's own output, or those of a rank, oldest attempt first.

    The job's output has the launcher's lines and what rank 0 prints, over all attempts. An
    `attempt` without a rank means rank 0's.

    Raises
    ------
    UsageError
        there is no such rank or attempt; names those that there are
    """
    outputs = sorted(run.logs.glob("slurm*.out"))
    if rank is None and attempt is None and outputs:
        return outputs
    wanted = rank or 0
    folders = [a for a in run.attempts() if attempt in (None, a.number)]
    files = [node.rank_log(wanted) for a in folders for node in a.nodes()]
    found = [path for path in files if path.exists()]
    if not found and not (rank is None or run.attempts()):
        return []
    if not found and not run.attempts():
        raise UsageError(f"run {run.id} has printed nothing yet", hint=f"hpc-ddp explain {run.id}")
    if not found and is_by_hand(run.events()):
        raise UsageError(
            f"run {run.path} was started by hand: what it printed went to its terminal",
            hint=f"hpc-ddp explain {shlex.quote(str(run.path))}",
        )
    if not found:
        ranks = {p.stem.removeprefix("rank-") for p in run.logs.glob("attempt-*/*/rank-*.log")}
        raise UsageError(
            f"no log of rank {wanted}"
            + (f" in attempt {attempt}" if attempt is not None else "")
            + f"; ranks: {', '.join(sorted(ranks, key=int)) or 'none yet'};"
            + f" attempts: {', '.join(str(a.number) for a in run.attempts()) or 'none yet'}",
            hint=f"hpc-ddp logs {run.id}",
        )
    return found


def show(run: RunFolder, rank: int | None, attempt: int | None) -> None:
    """Copy the logs to stdout."""
    for path in log_files(run, rank, attempt):
        _copy(path, 0)


def follow(
    run: RunFolder, rank: int | None, attempt: int | None, ended: Callable[[], bool]
) -> None:
    """Copy the logs to stdout and go on with what is added, until `ended` says so."""
    if is_by_hand(run.events()):
        log_files(run, rank, attempt)  # where there are none, none will come
    read: dict[Path, int] = {}
    for poll in itertools.count():
        last = poll % ASK_EVERY == 0 and ended()  # asked first, so that all before it is shown
        with contextlib.suppress(UsageError):  # a rank that has not started yet
            for path in log_files(run, rank, attempt):
                read[path] = _copy(path, read.get(path, 0))
        if last:
            return
        time.sleep(POLL_S)


def _copy(path: Path, start: int) -> int:
    """Copy a file to stdout from byte `start` on; return where its end is."""
    with open(path, "rb") as file:
        file.seek(start)
        while chunk := file.read(1 << 20):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        return file.tell()
