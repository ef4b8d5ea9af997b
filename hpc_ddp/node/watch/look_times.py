"""When a supervisor reads the files of its attempt: after each change, and now and then."""

from __future__ import annotations

import math
import os
import time

from hpc_ddp.core.attempt_env import INTERACTIVE
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.watch.folder_watch import FolderWatch
from hpc_ddp.node.watch.wake_links import PeerLinks, Task

LOOK_EVERY_S = 1.0
FENCE_EVERY_S = 10.0  # listing a folder costs an NFS server more than opening a file
# Pauses of a supervisor that is told of each change, and looks all the same, in case one is lost.
QUIET_FIRST_S = 20.0  # of the first supervisor, whose look serves all
QUIET_S = 60.0  # of the others, times the number of supervisors on a node
QUICK_S = 5.0  # of short pauses after a change: this host's cache may still have the old file


class AttemptWatch:
    """Tells a supervisor when to read the attempt's files.

    The first supervisor runs on the node of the batch script: Linux tells it of the script's
    writes, and it wakes the other supervisors. A supervisor that lacks a link to a peer, or is not
    told by Linux, reads the files each `LOOK_EVERY_S`.
    """

    def __init__(self, place: Place, task: Task) -> None:
        """Begin, in the first supervisor (``task.index`` 0) of a batch job, to watch the attempt's
        folder. `place` and `task` are the supervisor's own. The caller has to start `links`."""
        self.links = PeerLinks(place, task)
        # Seconds, while `is_quiet`, between two looks, and between two looks for a later attempt.
        self._quiet_s = QUIET_S * task.per_node if task.index else QUIET_FIRST_S
        self._quiet_fence_s = self._quiet_s * (2 if task.index else 1)
        self._has_peers = task.count > task.per_node  # on other nodes
        attempt = place.attempt
        self._names = {path.name for path in (attempt.notice, attempt.failed, attempt.end_time)}
        self._folder = None if task.index else FolderWatch(attempt.path)
        if self._folder and INTERACTIVE in os.environ:
            self._folder.close()  # the shell with the batch script may be on the login node
        self._look_at = self._quick_until = 0.0  # all by `time.monotonic()`
        self._fenced_at = -math.inf  # the last time that `begin_fence_if_due` was True

    @property
    def is_quiet(self) -> bool:
        """Whether this supervisor is told of each change, so that it need not look often: it has
        all its links, and the first supervisor the watch of Linux."""
        return self.links.is_whole and (self._folder is None or self._folder.works)

    def begin_look_if_due(self) -> bool:
        """Return whether the caller has to read ``notice``, ``failed`` and ``end-time`` now: after
        a wake-up, and once the pause since the last look is over. If so, begin a new pause. A pause
        lasts `LOOK_EVERY_S`, and far longer while `is_quiet`, but not in the first `QUICK_S` after
        a wake-up."""
        now = time.monotonic()
        if self._take_changes():
            self._quick_until = now + QUICK_S
        elif now < self._look_at:
            return False
        is_quiet = self.is_quiet and now >= self._quick_until
        self._look_at = now + (self._quiet_s if is_quiet else LOOK_EVERY_S)
        return True

    def _take_changes(self) -> bool:
        """Return whether, since the last call, a peer has woken this supervisor, or Linux has told
        of a change of the attempt's files or has lost events. After a change or lost events wake
        the peers. The wake-up and the changes are then forgotten."""
        is_woken = self.links.take_wake()
        if self._folder and self._folder.works:
            names = self._folder.take_changes()
            if names is None or names & self._names:  # None: events were lost
                self.links.wake()
                return True
        return is_woken

    def begin_fence_if_due(self) -> bool:
        """Return whether the caller has to look for a later attempt now: once the pause since the
        last such look is over. If so, begin a new pause. It lasts `FENCE_EVERY_S`, and longer
        (`_quiet_fence_s`) for a supervisor with peers on other nodes while it `is_quiet`.

        Where a later attempt runs, behind a cut link or beside a dead slurmd, peers of this attempt
        are gone, which links show. A job of one node has no such sign. Nor have nodes that have
        lost the controller but not each other: there the first supervisor looks more often than the
        others, which notice its end.
        """
        now = time.monotonic()
        is_rare = self._has_peers and self.is_quiet
        pause = self._quiet_fence_s if is_rare else FENCE_EVERY_S
        if now < self._fenced_at + pause:
            return False
        self._fenced_at = now
        return True
