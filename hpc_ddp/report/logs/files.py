"""The log files of a run, and the lines that are new in a growing one."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import open_data
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.explain.facts import is_standalone

CHUNK = 1 << 16  # bytes read of a log at once: there may be thousands of logs


@dataclass(frozen=True)
class LogQuery:
    """The lines to show: of one `rank`, of the `job` itself, else of all ranks, merged.

    Merged lines are tidied: noise is left out and equal lines are folded, unless `raw`.

    Raises
    ------
    UsageError
        `job` with a rank or an attempt
    """

    rank: int | None = None
    attempt: int | None = None
    job: bool = False
    raw: bool = False

    def __post_init__(self) -> None:
        if self.job and (self.rank is not None or self.attempt is not None):
            raise UsageError(
                "--job was given with --rank or --attempt: the job's output is one file, of all",
                hint="leave out --job",
            )


def log_files(run: RunFolder, rank: int | None, attempt: int | None) -> list[Path]:
    """Return the files of the job's own output, or of a rank, oldest attempt first.

    The job's output has the launcher's lines and rank 0's, over all attempts. An `attempt` without
    a rank means rank 0's, as does neither where the job has no output. [] for a rank before the
    first attempt.

    Raises
    ------
    UsageError
        no such rank or attempt (the message lists the existing ones), nothing printed yet, or a
        script that was started by hand, whose output went to its terminal
    OSError
        an attempt's folder, or the journal, can't be read
    """
    outputs = sorted(run.logs.glob("slurm*.out"))
    if rank is None and attempt is None and outputs:
        return outputs
    attempts = run.attempts()
    if not attempts:
        if rank is not None:
            return []
        raise UsageError(
            f"run {run.path} has printed nothing yet", hint=f"hpc-ddp explain {run.quoted}"
        )
    nodes = [node for a in attempts if attempt in (None, a.number) for node in a.nodes()]
    paths = [path for node in nodes if (path := node.rank_log(rank or 0)).exists()]
    if paths:
        return paths
    if is_standalone(run.events()):
        raise UsageError(
            f"run {run.path} was started by hand: its output went to its terminal",
            hint=f"hpc-ddp explain {run.quoted}",
        )
    ranks = {p.stem.removeprefix("rank-") for p in run.logs.glob("attempt-*/*/rank-*.log")}
    in_attempt = f" in attempt {attempt}" if attempt is not None else ""
    raise UsageError(
        f"no log of rank {rank or 0}{in_attempt}"
        f"; ranks: {', '.join(sorted(ranks, key=int)) or 'none yet'}"
        f"; attempts: {', '.join(str(a.number) for a in attempts)}",
        hint=f"hpc-ddp logs {run.quoted}",
    )


class LogFile:
    """A growing file, read line by line.

    `times` and `sizes` are the supervisor's notes of its size over time. With `tidy`, only the
    last state of a progress bar is a line.
    """

    def __init__(self, path: Path, tidy: bool = False) -> None:
        self.path, self._tidy, self._position = path, tidy, 0
        self.times: list[float] = []
        self.sizes: list[int] = []

    @property
    def may_have_grown(self) -> bool:
        """Whether it may have new lines: by the supervisor's notes, without a look at the file.
        True without notes."""
        return not self.sizes or self.sizes[-1] > self._position

    def new_lines(self, is_last: bool) -> Iterator[tuple[float, bytes]]:
        """Yield the new lines with their times, in unix seconds; the next call begins behind the
        last one. A line has its line break; one without is yielded only if `is_last`. A file that
        can't be read has none."""
        partial = b""
        while True:
            try:
                with open_data(self.path) as file:  # not kept open: there may be thousands
                    file.seek(self._position + len(partial))
                    chunk = file.read(CHUNK)
            except OSError:
                return
            *lines, partial = (partial + chunk).split(b"\n")
            for line in lines:
                self._position += len(line) + 1
                yield self._time_of(self._position), self._last_drawn(line) + b"\n"
            if self._tidy:
                drawn = self._last_drawn(partial)
                self._position += len(partial) - len(drawn)
                partial = drawn
            if not chunk:
                break
        if partial and is_last:
            self._position += len(partial)
            yield self._time_of(self._position), partial

    def _last_drawn(self, line: bytes) -> bytes:
        """Return the last state of a progress bar in a line, which is all behind its last carriage
        return; the line as it is unless `tidy`."""
        bar = line.rstrip(b"\r")
        return line[bar.rfind(b"\r") + 1 :] if self._tidy else line

    def _time_of(self, size: int) -> float:
        """Return the time (unix seconds) of the first note by which the file had `size` bytes;
        beyond the notes that of its last change, or now where that can't be read."""
        index = bisect_left(self.sizes, size)
        if index < len(self.times):
            return self.times[index]
        with contextlib.suppress(OSError):
            return max(self.path.stat().st_mtime, *self.times[-1:], 0.0)
        return time.time()
