"""A cold parallel file system, played by FUSE: a folder, read-only, behind a slow server.

``python bench/slow_mount.py FOLDER MOUNT COUNTS`` mounts FOLDER at MOUNT and stays in the
foreground; it ends when MOUNT is unmounted. It needs root or fusermount, libfuse 2, and the package
mfusepy, which nothing else of this repository needs.

Each metadata call (lookup, getattr, readdir, readlink, open) takes 1 ms. A read that goes on where
the last one of its file handle has ended gets 200 MB/s, any other one 0.35 MB/s. The kernel keeps
attributes, names and pages, as of a network file system whose files nobody else changes. COUNTS is
a file with two numbers, 8 bytes each: of metadata calls, and of bytes that were read.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
import threading
import time

import mfusepy as fuse  # type: ignore[import-not-found]

CALL_S = 0.001
SEQUENTIAL, RANDOM = 200e6, 0.35e6  # bytes/s
AHEAD_S = 0.1  # of a sequential stream that was held up: it may catch up by so much
FOREVER_S = 86400


class Handle:
    """An open file: where its last read has ended, and when the stream is due."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.end, self.due = descriptor, -1, 0.0
        self.mutex = threading.Lock()


class SlowFolder(fuse.Operations):  # type: ignore[misc]
    """The operations of the mount."""

    use_ns = True

    def __init__(self, folder: str, counts: str) -> None:
        self.folder = folder.encode()
        self.handles: dict[int, Handle] = {}
        self.mutex = threading.Lock()
        with open(counts, "wb+") as file:
            file.write(bytes(16))
            file.flush()
            self.counts = mmap.mmap(file.fileno(), 16)

    def _count(self, index: int, number: int) -> None:
        with self.mutex:
            (old,) = struct.unpack_from("q", self.counts, 8 * index)
            struct.pack_into("q", self.counts, 8 * index, old + number)

    def _call(self, path: str) -> bytes:
        """Take the time of a metadata call, and return the path in the folder."""
        self._count(0, 1)
        time.sleep(CALL_S)
        return self.folder + os.fsencode(path)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        try:
            status = os.lstat(self._call(path))
        except FileNotFoundError:
            raise fuse.FuseOSError(errno.ENOENT) from None
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
        times = {f"st_{kind}time": getattr(status, f"st_{kind}time_ns") for kind in "amc"}
        return {**{name: getattr(status, name) for name in names}, **times}

    def readlink(self, path: str) -> str:
        return os.fsdecode(os.readlink(self._call(path)))

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *map(os.fsdecode, os.listdir(self._call(path)))]

    def open(self, path: str, flags: int) -> int:
        descriptor = os.open(self._call(path), os.O_RDONLY)
        self.handles[descriptor] = Handle(descriptor)
        return descriptor

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        handle = self.handles[fh]
        with handle.mutex:
            content = os.pread(handle.descriptor, size, offset)
            self._count(1, len(content))
            now = time.monotonic()
            is_next = offset == handle.end
            handle.end = offset + len(content)
            begin = max(handle.due, now - AHEAD_S) if is_next else now
            handle.due = begin + len(content) / (SEQUENTIAL if is_next else RANDOM)
            if handle.due > now:
                time.sleep(handle.due - now)
        return content

    def release(self, path: str, fh: int) -> int:
        del self.handles[fh]  # first: the number may be given again at once
        os.close(fh)
        return 0


if __name__ == "__main__":
    source, mount, counts_file = sys.argv[1:]
    times = {f"{name}_timeout": FOREVER_S for name in ("entry", "attr", "negative", "ac_attr")}
    fuse.FUSE(
        SlowFolder(source, counts_file),
        mount,
        foreground=True,
        ro=True,
        kernel_cache=True,
        sync_read=True,
        **times,
    )
