"""Finds a torchrun that lives on without workers, as it should only for a short while."""

from __future__ import annotations

import math
from contextlib import suppress

from hpc_ddp.core.job.attempt_folder import NodeFolder
from hpc_ddp.core.process import live_pid, may_hide

LOOK_EVERY_S = 300.0  # a look lists a folder of the shared disk, and opens a file there
# torchrun waits up to five minutes for its peers' ends, and ten for a rendezvous.
MOST_LOOKS = 4


class AgentWatch:
    """Tells a supervisor of a torchrun that does not end, though all of its workers have ended: it
    is stopped, or waits for what never comes. Its peers' agents have given up by then."""

    def __init__(self, folder: NodeFolder) -> None:
        """Begin with no looks. `folder` has the pid files of the workers; in the folder of one
        worker, which is the supervisor's child, no look is made: there is no torchrun."""
        self._folder = folder
        self._look_at = -math.inf if folder.rank is None else math.inf
        self._looks = 0  # the last ones in a row that have shown workers, none of which runs

    def is_idle(self, now: float) -> bool:
        """Look at the pid files if a look is due, `LOOK_EVERY_S` after the last look; return
        whether the last `MOST_LOOKS` looks have shown that no worker runs any more. `now` is in
        seconds, by a clock of the caller. Looks are counted, not seconds: a job that is suspended
        makes none."""
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self._looks = self._looks + 1 if self._have_workers_ended() else 0
        return self._looks >= MOST_LOOKS

    def _have_workers_ended(self) -> bool:
        """Return whether workers have started, and none of them runs; False where the folder can't
        be read."""
        with suppress(OSError):
            files = self._folder.pids()
            return bool(files) and not any(live_pid(f) or may_hide(f) for f in files)
        return False
