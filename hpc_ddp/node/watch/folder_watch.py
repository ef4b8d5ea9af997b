"""Changes in a folder, as Linux tells them (inotify), so that nothing has to look at the files.

Linux tells of the writes of this host's processes, on any file system: each write passes through
the kernel. It does not tell of the writes that another host makes on a shared disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import weakref
from pathlib import Path

MODIFY, MOVED_TO, CREATE, OVERFLOW = 0x2, 0x80, 0x100, 0x4000  # linux/inotify.h
_HEAD = struct.Struct("iIII")  # of an event: watch, mask, cookie, length of the name
BUFFER_BYTES = 65536


class FolderWatch:
    """Collects the names of files in a folder that processes of this host create or change."""

    def __init__(self, folder: Path) -> None:
        """Begin to watch `folder`. Where this is not possible (another system than Linux, a limit
        of the kernel's, no such folder), `works` is False, and `take_changes` returns None."""
        self._fd = -1
        if sys.platform != "linux":
            return
        libc = ctypes.CDLL(None)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return
        if libc.inotify_add_watch(fd, os.fsencode(folder), MODIFY | MOVED_TO | CREATE) < 0:
            os.close(fd)
            return
        self._fd = fd
        self._finalize = weakref.finalize(self, os.close, fd)  # a user may have 128, as a rule

    @property
    def works(self) -> bool:
        """Whether the folder is watched; else `take_changes` always returns None."""
        return self._fd >= 0

    def take_changes(self) -> set[str] | None:
        """Return the names of files that were created or changed since the last call, and forget
        them; None where they are not known, and any file may have changed. Raise OSError where the
        watch can't be read."""
        if not self.works:
            return None
        names: set[str] = set()
        is_known = True
        with contextlib.suppress(BlockingIOError):  # all is read
            while events := os.read(self._fd, BUFFER_BYTES):
                is_known &= self._add_names(events, names)
        return names if is_known else None

    def close(self) -> None:
        """End the watch: `works` is False from now on."""
        if self.works:
            self._finalize()  # closes the descriptor
            self._fd = -1

    def _add_names(self, events: bytes, names: set[str]) -> bool:
        """Add the names of files in `events`, bytes of the kernel's, to `names`; return whether the
        names are complete: False where the kernel has lost events, or has ended the watch."""
        is_known, at = True, 0
        while at < len(events):
            _, mask, _, length = _HEAD.unpack_from(events, at)
            at += _HEAD.size
            name = events[at : at + length].rstrip(b"\0")
            at += length
            if mask & (MODIFY | MOVED_TO | CREATE):
                names.add(os.fsdecode(name))
            else:
                is_known = False
        return is_known
