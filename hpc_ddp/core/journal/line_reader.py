"""Reads the lines of a run's journal files: within a budget, and small files ahead."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from hpc_ddp.core.file_io import READER_THREADS, SmallFile, open_data, read_small_files

# The budget for all journal files of another user's run: a sparse file of terabytes must neither
# fill the memory nor take hours.
MOST_FOREIGN_BYTES, MOST_FOREIGN_FILES = 1 << 26, 50_000
# Curves of hundreds of values a line come to gigabytes in a run of weeks, which must go on: of the
# lines for curves only those in so many last bytes of a file are read. All other lines are few.
CURVE_BYTES = 1 << 26
# The beginning of a line for a curve, as `Journal` writes it: its time and its kind.
CURVE_START = rb'\{"time": (\d{1,14}\.?\d*), "event": "(metrics|ranks)"'
_IS_OF_CURVE = re.compile(CURVE_START).match
LONGEST_LINE = 1 << 20  # bytes; names of 5,000 nodes are a tenth of it
AT_ONCE = 512  # small files that are read ahead


class LineReader:
    """Reads the lines of a run's journal files. The files of other users that one reader reads
    share one budget: `MOST_FOREIGN_BYTES` bytes, `MOST_FOREIGN_FILES` files."""

    def __init__(self) -> None:
        self._bytes = self._files = 0

    def read_folder(self, folder: Path, names: Sequence[str]) -> Iterator[Iterator[bytes]]:
        """Yield, for each of the files `names` in a folder, an iterator over the file's lines: that
        of `read`, which raises its errors. Raise OSError where the folder can't be opened.

        Threads read small files ahead, `AT_ONCE` of them: a job of a thousand nodes has thousands,
        and a shared disk opens one in a millisecond.
        """
        with ThreadPoolExecutor(READER_THREADS) as pool:  # a thread starts as it gets work
            for begin in range(0, len(names), AT_ONCE):
                some = names[begin : begin + AT_ONCE]
                for name, small in zip(some, _read_ahead(pool, folder, some), strict=True):
                    path = folder / name
                    if small is None:
                        yield self.read(path)
                    else:
                        yield self._lines(BytesIO(small.content), small.is_foreign, path)

    def read(self, path: Path) -> Iterator[bytes]:
        """Yield the lines of a file without their ends. A line of `LONGEST_LINE` bytes or more is
        left out. In a file of the user's own a line of `metrics` or `ranks` before the last
        `CURVE_BYTES` is left out, too.

        Raises
        ------
        OSError
            the file can't be read, is no regular file, or lies behind a link of another user; the
            budget for other users' files is spent; or a file of another user has a line of
            `LONGEST_LINE` bytes or more, as a sparse file has
        """
        with open_data(path) as file:
            status = os.fstat(file.fileno())
            is_foreign = status.st_uid != os.geteuid()
            lines = self._lines(file, is_foreign, path)
            old_bytes = 0 if is_foreign else status.st_size - CURVE_BYTES
            yield from lines if old_bytes <= 0 else _without_old_curve(lines, old_bytes)

    def _lines(self, file: BinaryIO, is_foreign: bool, path: Path) -> Iterator[bytes]:
        """Yield the lines of an open file as `read` does, also all those of curves, and count the
        file in the budget. Where the file is another user's (`is_foreign`), raise OSError, which
        names `path`, for a spent budget or a line that is too long."""
        self._files += is_foreign
        is_rest = False  # True for the rest of a line that is too long
        while line := file.readline(LONGEST_LINE):
            self._bytes += len(line) if is_foreign else 0
            is_spent = self._bytes > MOST_FOREIGN_BYTES or self._files > MOST_FOREIGN_FILES
            is_long = len(line) == LONGEST_LINE and not line.endswith(b"\n")
            if is_foreign and (is_spent or is_long):
                raise OSError(errno.EFBIG, "too large for a journal", str(path))
            if not (is_long or is_rest):
                yield line.rstrip(b"\r\n")
            is_rest = is_long


def _without_old_curve(lines: Iterator[bytes], old_bytes: int) -> Iterator[bytes]:
    """Yield lines of a file, except those of `metrics` and `ranks` within its first `old_bytes`."""
    count = 0
    for line in lines:
        count += len(line) + 1  # its end
        if count > old_bytes or not _IS_OF_CURVE(line):
            yield line


def _read_ahead(
    pool: ThreadPoolExecutor, folder: Path, names: Sequence[str]
) -> list[SmallFile | None]:
    """Return the files with these names as `read_small_files` does: many by the threads of the
    pool, `AT_ONCE` / `READER_THREADS` or fewer by this thread. Raise OSError where the folder can't
    be opened."""
    size = AT_ONCE // READER_THREADS
    parts = [names[begin : begin + size] for begin in range(0, len(names), size)]
    if len(parts) == 1:
        return read_small_files(folder, names)
    files = pool.map(partial(read_small_files, folder), parts)
    return [file for part in files for file in part]
