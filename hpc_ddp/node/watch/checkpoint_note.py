"""Notes that the script's own checkpoint (``--resume-if``) is there, while an attempt runs."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from hpc_ddp.node.workers.worker import note_checkpoint

PAUSE_S = 5.0


def watch_checkpoint() -> None:
    """Begin to look every few seconds, in a thread, for the checkpoint, until one is noted
    (`note_checkpoint`): a node that is lost makes no note at its end. The disk may hang, and must
    not hold up the supervisor. Do nothing without HPC_DDP_RESUME_IF."""
    if os.environ.get("HPC_DDP_RESUME_IF"):
        threading.Thread(target=_watch, daemon=True).start()


def note_now() -> bool:
    """Note a checkpoint if there is one; return whether one is noted."""
    with suppress(OSError):
        return note_checkpoint(waits=False)
    return False


def _watch() -> None:
    """Look for the checkpoint until one is noted."""
    while not note_now():
        time.sleep(PAUSE_S)
