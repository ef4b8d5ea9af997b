"""The log files of a run, and the lines that are new in a growing one."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import open_data, read_json
from hpc_ddp.core.journal.journal import read_briefly
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.explain.facts import is_standalone

CHUNK_BYTES, LEAST_CHUNK_BYTES = 1 << 20, 1 << 15  # read of a log at once
MERGED_BYTES = 1 << 25  # of all logs that are merged: there may be thousands, each with a chunk


@dataclass(frozen=True)
class LogQuery:
    """The lines to show. With `rank` they are that rank's, with `job` the job's own output, else
    those of all ranks, merged. With `attempt` the lines of that attempt count, with None those of
    all.

    Merged lines are tidied, unless `raw`: noise is left out and equal lines are folded.

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

    With neither `rank` nor `attempt` the files are the job's output, which has the launcher's lines
    and rank 0's over all attempts. Where the job has none, and for an `attempt` without a `rank`,
    the files are rank 0's. [] for a rank before the first attempt.

    Raises
    ------
    UsageError
        no such rank or attempt (the message lists the existing ones), a rank of a whole array,
        nothing printed yet, or a script that was started by hand, whose output went to its terminal
    OSError
        the run's folder, one of an attempt, or the journal can't be read
    """
    outputs = run.outputs()
    if rank is None and attempt is None and outputs:
        return outputs
    attempts = run.attempts()
    if rank is not None and not run.is_task and read_json(run.job_json).get("array"):
        raise UsageError(
            f"run {run.path} is an array; accepted with --rank: a task of it",
            hint=f"hpc-ddp logs {run.task(0).quoted} --rank {rank}",
        )
    if not attempts:
        if rank is not None:
            return []
        raise UsageError(
            f"run {run.path} has printed nothing yet", hint=f"hpc-ddp explain {run.quoted}"
        )
    if paths := rank_logs(run, rank or 0, attempt):
        return paths
    check_keeps_output(run)
    ranks = {p.stem.removeprefix("rank-") for p in run.logs.glob("attempt-*/*/rank-*.log")}
    in_attempt = f" in attempt {attempt}" if attempt is not None else ""
    raise UsageError(
        f"no log of rank {rank or 0}{in_attempt}"
        f"; ranks: {', '.join(sorted(ranks, key=int)) or 'none yet'}"
        f"; attempts: {', '.join(str(a.number) for a in attempts)}",
        hint=f"hpc-ddp logs {run.quoted}",
    )


def rank_logs(run: RunFolder, rank: int, attempt: int | None) -> list[Path]:
    """Return the logs of a rank, oldest attempt first: of one attempt, or (None) of all. Raise
    OSError where a folder can't be read."""
    nodes = [n for a in run.attempts() if attempt in (None, a.number) for n in a.nodes()]
    return [path for node in nodes if (path := node.rank_log(rank)).exists()]


def check_keeps_output(run: RunFolder) -> None:
    """Raise UsageError for a script that was started by hand (`is_standalone`), and OSError where
    the journal can't be read."""
    if is_standalone(read_briefly(run.journal_folder)):
        raise UsageError(
            f"run {run.path} was started by hand: its output went to its terminal",
            hint=f"hpc-ddp explain {run.quoted}",
        )


def chunk_for(count: int) -> int:
    """Return how many bytes to read at once of each of `count` logs that are merged."""
    return min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, MERGED_BYTES // max(count, 1)))


class Cut(NamedTuple):
    """A size in bytes that a log had: no block of lines goes beyond it. With `is_alone` no other
    log grew within seconds of the lines between the cut before and this one."""

    size: int
    is_alone: bool


class Block(NamedTuple):
    """Lines of a log that were printed together; `time`, in unix seconds, is that of the first
    line. With `is_alone` no other log grew within seconds.

    The last line may lack its line break.
    """

    time: float
    text: bytes
    is_alone: bool


class LogFile:
    """A growing file, read by whole lines.

    `position` is the number of bytes that were read. `times` (unix seconds) and `sizes` (bytes) are
    the supervisor's notes of the file's size over time; both rise. With `tidy`, only the last state
    of a progress bar is a line.
    """

    __slots__ = ("_tidy", "path", "position", "sizes", "times")

    def __init__(self, path: Path, tidy: bool = False) -> None:
        self.path, self._tidy, self.position = path, tidy, 0
        self.times: list[float] = []
        self.sizes: list[int] = []

    @property
    def may_have_grown(self) -> bool:
        """Whether the file may have new lines, by the supervisor's notes, without a look at the
        file. True without notes."""
        return not self.sizes or self.sizes[-1] > self.position

    def new_text(
        self, is_last: bool, content: bytes | None = None, size: int = CHUNK_BYTES
    ) -> Iterator[bytes]:
        """Yield the new lines, several in one text; the next call begins behind the last one. A
        line without its line break is yielded only if `is_last`. A file that can't be read has no
        lines.

        `content` is the whole content of the file; where it is None the file is read, `size` bytes
        at once.
        """
        partial = b""
        while True:
            chunk = self._read(self.position + len(partial), content, size)
            if chunk is None:
                return
            end = chunk.rfind(b"\n") + 1
            if end:
                text = partial + chunk[:end]
                self.position += len(text)
                yield text
                partial = chunk[end:]
            else:
                partial += chunk
            if self._tidy and b"\r" in partial:
                drawn = _last_drawn(partial)
                self.position += len(partial) - len(drawn)
                partial = drawn
            if not chunk:
                break
        if partial and is_last:
            self.position += len(partial)
            yield partial

    def _read(self, position: int, content: bytes | None, size: int) -> bytes | None:
        """Return what follows a position of the file: the rest of `content`, or for None at most
        `size` bytes from the disk; None where the file can't be read."""
        if content is not None:
            return content[position:]
        try:
            with open_data(self.path) as file:  # not kept open: there may be thousands
                file.seek(position)
                return file.read(size)
        except OSError:
            return None

    def new_blocks(
        self,
        is_last: bool,
        cuts: Sequence[Cut],
        content: bytes | None = None,
        size: int = CHUNK_BYTES,
    ) -> Iterator[Block]:
        """Yield the new lines in blocks: a block ends at the last line break before each of the
        `cuts`, whose sizes rise. `is_last`, `content` and `size` are as in `new_text`."""
        next_cut = 0
        for text in self.new_text(is_last, content, size):
            begin, at = self.position - len(text), 0
            while at < len(text):
                while next_cut < len(cuts) and cuts[next_cut].size <= begin + at:
                    next_cut += 1
                end, is_alone = len(text), False
                if next_cut < len(cuts):
                    cut, is_alone = cuts[next_cut]
                    if cut < begin + end:
                        end = text.rfind(b"\n", at, cut - begin) + 1
                        next_cut += 1
                if end > at:
                    first = text.find(b"\n", at, end) + 1 or end
                    seconds = self._time_of(begin + first)
                    yield Block(seconds, self._drawn(text[at:end]), is_alone)
                    at = end

    def _drawn(self, text: bytes) -> bytes:
        """Return lines with the last state of each progress bar; as they are unless `tidy`."""
        if not self._tidy or b"\r" not in text:
            return text
        return b"\n".join(map(_last_drawn, text.split(b"\n")))

    def _time_of(self, size: int) -> float:
        """Return the time (unix seconds) of the first note by which the file had `size` bytes. For
        a size beyond the notes return the time of the file's last change, but no time before the
        last note; or the present time where the file can't be looked at."""
        index = bisect_left(self.sizes, size)
        if index < len(self.times):
            return self.times[index]
        with contextlib.suppress(OSError):
            return max(self.path.stat().st_mtime, *self.times[-1:], 0.0)
        return time.time()


def _last_drawn(line: bytes) -> bytes:
    """Return the last state of a progress bar in a line: all behind its last carriage return."""
    bar = line.rstrip(b"\r")
    return line[bar.rfind(b"\r") + 1 :]
