"""The notice and its like from a supervisor to its workers, in a file of memory: a read costs no
shared disk."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from hpc_ddp.core.process import LOCAL_NOTICE, memory_file


class LocalNotice:
    """Holds the source of a notice, the end of the job's time, and a beat, as JSON.

    The beat is the time on this host's monotonic clock when the supervisor was last seen at work: a
    worker does not rely on one that hangs.

    A worker opens the file by way of the supervisor's process (``/proc/<pid>/fd/<number>``). So it
    is nowhere on a disk, only processes of the same user can read it, and it is gone with the
    supervisor, whatever ends that. In a PID namespace of the worker's own, as a container may have
    one, the path leads nowhere, or to another process's file: such a worker asks the disk.
    """

    def __init__(self) -> None:
        """Make the file, empty. Where the system has no files in memory, none is made, and `write`
        does nothing."""
        self._fd = -1
        with suppress(OSError):
            self._fd = memory_file(LOCAL_NOTICE)
        self._fields: dict[str, object] = {}
        self._size_bytes = 0

    def env(self) -> dict[str, str]:
        """Return the environment variable by which workers find the file; {} without a file."""
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return {"HPC_DDP_LOCAL_NOTICE": path} if self._fd >= 0 else {}

    def write(self, **fields: object) -> None:
        """Set ``source``, ``end_time`` (unix seconds) or ``beat`` (seconds of time.monotonic()) in
        the file; fields of earlier calls stay. Do nothing without a file; an OSError is passed
        over. The text is overwritten in one call, and never gets shorter, so a reader always finds
        whole JSON."""
        if self._fd < 0:
            return
        self._fields |= fields
        text = json.dumps(self._fields).encode().ljust(self._size_bytes)  # covers the old text
        self._size_bytes = len(text)
        with suppress(OSError):
            os.pwrite(self._fd, text, 0)
