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

CHUNK_BYTES, LEAST_CHUNK_BYTES = 1 << 20, 1 << 15  # so many bytes of a log are read at once
MERGED_BYTES = 1 << 25  # of all logs that are merged together: there may be thousands


@dataclass(frozen=True)
class LogQuery:
    """The lines to show: those of `rank`, with `job` those of the job's own output, else those of
    all ranks, merged. They are of `attempt`, or (None) of all attempts.

    Merged lines are tidied, unless `raw`: noise is left out and equal lines are folded.

    Raises
    ------
    UsageError
        `job` together with a rank or an attempt
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


def find_log_files(run: RunFolder, rank: int | None, attempt: int | None) -> list[Path]:
    """Return the files of the job's own output, or the logs of a rank, oldest attempt first.

    With neither `rank` nor `attempt` (both None) the files are the job's output, which has the
    launcher's lines and rank 0's over all attempts. Where the job has none, and for an `attempt`
    without a `rank`, they are rank 0's logs. [] for a rank before the first attempt.

    Raises
    ------
    UsageError
        the run has no such rank or attempt (the message lists the existing ones), is an array and
        `rank` is given, has printed nothing yet, or was started by hand, so that its output went to
        its terminal
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
    if paths := find_rank_logs(run, rank or 0, attempt):
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


def find_rank_logs(run: RunFolder, rank: int, attempt: int | None) -> list[Path]:
    """Return the paths of a rank's logs, oldest attempt first: of one attempt, or (None) of all.
    Raise OSError where a folder can't be read."""
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


def chunk_bytes(count: int) -> int:
    """Return how many bytes to read at once of each of `count` logs that are merged."""
    return min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, MERGED_BYTES // max(count, 1)))


class Cut(NamedTuple):
    """A size in bytes that a log had at some time: a block of lines ends there at the latest. With
    `is_alone` no other log has grown within seconds of the lines between the cut before this one
    and this cut."""

    size: int
    is_alone: bool


class Block(NamedTuple):
    """Lines of a log that were printed together; `time` is that of the first line, in unix seconds.
    With `is_alone` no other log has grown within seconds of it. The last line may lack its line
    break."""

    time: float
    text: bytes
    is_alone: bool


class LogFile:
    """A growing file, read by whole lines.

    `position` is the number of bytes that were read. `times` (unix seconds) and `sizes` (bytes) are
    the supervisor's notes of the file's size over time, in ascending order; the owner of the object
    adds them. With `tidy` a progress bar counts as one line, with its last state.
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

    def read_new_text(
        self, is_last: bool, content: bytes | None = None, size: int = CHUNK_BYTES
    ) -> Iterator[bytes]:
        """Yield the new lines as texts of one or more lines; the next call begins behind the last
        one. A line without its line break is yielded only if `is_last`. A file that can't be read
        has no lines.

        `content` is the whole content of the file; where it is None the file is read, `size` bytes
        at once.
        """
        partial = b""  # the beginning of a line, whose end is not read yet
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
            if self._tidy and b"\r" in partial:  # a bar that is drawn anew: earlier states go
                bar = _last_state(partial)
                self.position += len(partial) - len(bar)
                partial = bar
            if not chunk:
                break
        if partial and is_last:
            self.position += len(partial)
            yield partial

    def _read(self, position: int, content: bytes | None, size: int) -> bytes | None:
        """Return the bytes behind a position of the file: the rest of `content`, or (None) at most
        `size` bytes from the disk; None where the file can't be read."""
        if content is not None:
            return content[position:]
        try:
            with open_data(self.path) as file:  # not kept open: there may be thousands
                file.seek(position)
                return file.read(size)
        except OSError:
            return None

    def read_new_blocks(
        self,
        is_last: bool,
        cuts: Sequence[Cut],
        content: bytes | None = None,
        size: int = CHUNK_BYTES,
    ) -> Iterator[Block]:
        """Yield the new lines in blocks: one ends at the last line break before each of the `cuts`,
        whose sizes ascend, and at the end of each text of `read_new_text`. `is_last`, `content` and
        `size` are as there."""
        next_cut = 0  # an index of `cuts`
        for text in self.read_new_text(is_last, content, size):
            text_begin, at = self.position - len(text), 0  # in the file; in the text
            while at < len(text):
                while next_cut < len(cuts) and cuts[next_cut].size <= text_begin + at:
                    next_cut += 1
                end, is_alone = len(text), False
                if next_cut < len(cuts):
                    cut, is_alone = cuts[next_cut]
                    if cut < text_begin + end:
                        end = text.rfind(b"\n", at, cut - text_begin) + 1  # 0 without a line break
                        next_cut += 1
                if end > at:
                    first_line_end = text.find(b"\n", at, end) + 1 or end
                    seconds = self._time_of(text_begin + first_line_end)
                    yield Block(seconds, self._tidied(text[at:end]), is_alone)
                    at = end

    def _tidied(self, text: bytes) -> bytes:
        """Return lines with the last state of each progress bar alone; unchanged unless `tidy`."""
        if not self._tidy or b"\r" not in text:
            return text
        return b"\n".join(map(_last_state, text.split(b"\n")))

    def _time_of(self, size: int) -> float:
        """Return the time (unix seconds) of the first note by which the file had `size` bytes. For
        a size beyond the notes return the time of the file's last change, or that of the last note
        if it is later; the present time where the file can't be looked at."""
        index = bisect_left(self.sizes, size)
        if index < len(self.times):
            return self.times[index]
        with contextlib.suppress(OSError):
            return max(self.path.stat().st_mtime, *self.times[-1:], 0.0)
        return time.time()


def _last_state(line: bytes) -> bytes:
    """Return the last state of a progress bar in a line: all behind the last carriage return with
    text behind it."""
    bar = line.rstrip(b"\r")
    return line[bar.rfind(b"\r") + 1 :]
