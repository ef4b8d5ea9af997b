"""When a supervisor reads the files of its attempt: after each change, and now and then."""

from __future__ import annotations

import math
import os
import time

from hpc_ddp.core.attempt_env import INTERACTIVE
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.watch.folder_watch import FolderWatch
from hpc_ddp.node.watch.peer_links import PeerLinks, Task

LOOK_EVERY_S = 1.0
FENCE_EVERY_S = 10.0  # listing a folder costs an NFS server more than opening a file
# Where each change is told: all the same, in case one was not.
QUIET_FIRST_S = 20.0  # of the first supervisor, whose look serves all
QUIET_S = 60.0  # of the others; of each that shares its node, as many times as long
QUICK_S = 5.0  # after a change, in case this host's cache still has the file as it was


class AttemptWatch:
    """Tells a supervisor when the attempt's files are worth a look.

    Where the links to its peers are whole, the peers wake it. The first supervisor runs beside the
    batch script, whose writes Linux tells it of, and wakes the others. Where links are missing, or
    Linux does not tell, it looks each `LOOK_EVERY_S`.
    """

    def __init__(self, place: Place, task: Task) -> None:
        """Take the supervisor's place, and its number among those of the attempt; the first one
        begins to watch the attempt's folder. The owner starts `links`."""
        self.links = PeerLinks(place, task)
        # Seconds between two looks while `is_quiet`, and between two for a later attempt.
        self._quiet_s = QUIET_S * task.per_node if task.index else QUIET_FIRST_S
        self._quiet_fence_s = self._quiet_s * (2 if task.index else 1)
        self._has_peers = task.count > task.per_node  # on other nodes
        attempt = place.attempt
        self._names = {path.name for path in (attempt.notice, attempt.failed, attempt.end_time)}
        self._folder = None if task.index else FolderWatch(attempt.path)
        if self._folder and INTERACTIVE in os.environ:
            self._folder.close()  # the shell with the batch script may be on the login node
        self._look_at = self._quick_until = 0.0  # all by `time.monotonic()`
        self._fenced_at = -math.inf  # the last time that `is_fence_due` was True

    @property
    def is_quiet(self) -> bool:
        """Whether this supervisor is told of each change."""
        return self.links.is_whole and (self._folder is None or self._folder.works)

    def is_due(self) -> bool:
        """Return whether to read ``notice``, ``failed`` and ``end-time`` now. After a True the next
        one comes with a wake-up, or after `LOOK_EVERY_S`, or far later while `is_quiet`."""
        now = time.monotonic()
        if self._is_woken():
            self._quick_until = now + QUICK_S
        elif now < self._look_at:
            return False
        is_quiet = self.is_quiet and now >= self._quick_until
        self._look_at = now + (self._quiet_s if is_quiet else LOOK_EVERY_S)
        return True

    def _is_woken(self) -> bool:
        """Return whether a peer or Linux has told of a change since the last call; a change that
        Linux tells of is passed on to the peers."""
        is_woken = self.links.take_wake()
        if self._folder and self._folder.works:
            names = self._folder.changes()
            if names is None or names & self._names:
                self.links.wake()
                return True
        return is_woken

    def is_fence_due(self) -> bool:
        """Return whether to ask now if a later attempt has begun: True at most once in
        `FENCE_EVERY_S`, and less often while all peers are connected.

        Where a later attempt runs, behind a cut link or beside a dead slurmd, these peers are gone.
        A node without peers has no such sign, nor have nodes that have lost the controller and not
        each other: there the first supervisor looks for all, and the others see it go.
        """
        now = time.monotonic()
        is_rare = self._has_peers and self.is_quiet
        pause = self._quiet_fence_s if is_rare else FENCE_EVERY_S
        if now < self._fenced_at + pause:
            return False
        self._fenced_at = now
        return True
