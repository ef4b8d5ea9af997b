"""A copy of rank 0's log, and notes on when the logs of a node's workers have grown.

The workers write to their logs themselves: no process in between can lose or hold up what they
print. But a line has no time of its own. So about once a second the supervisor notes which logs
have grown, and to what size: by these notes lines of many ranks are put in order. Linux tells the
supervisor which logs have grown: a log that does not grow costs the shared disk nothing. The more
nodes there are, the more seldom each node writes its notes down.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.console.terminal import write_output
from hpc_ddp.core.job.attempt_folder import NodeFolder
from hpc_ddp.node.watch.folder_watch import FolderWatch

LIST_EVERY = 10  # looks; listing a folder costs an NFS server more than asking for sizes
NODES_PER_S = 100  # that write notes down, whatever the number of nodes
CHECK_AFTER_S, CHECK_EVERY_S = 30.0, 300.0  # whether Linux tells of all changes here


def _open_no_link(path: str, flags: int) -> int:
    """Open a file of hpc-ddp's own and return its descriptor, for `open` as its `opener`; raise
    OSError for a link, by which another user could lead to any file."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


class LogCopy:
    """Copies what is appended to a log to this process's stdout."""

    def __init__(self, log: Path) -> None:
        """Begin to copy behind the present end of the file `log`, which need not exist: an earlier
        start of the attempt, whose port was taken, has written what is there."""
        self.log = log
        self._position = log.stat().st_size if log.exists() else 0

    def copy_new(self) -> None:
        """Copy to stdout what was appended to the log since the last call; do nothing where there
        is no log. Raise OSError if the log can't be read."""
        try:
            with open(self.log, "rb", opener=_open_no_link) as file:
                file.seek(self._position)
                new = file.read()
        except FileNotFoundError:
            return
        self._position += len(new)
        write_output(new)


class Growth:
    """Appends lines to the file ``printed`` of a node: unix seconds, a rank, and the size in bytes
    that the rank's log had then. In an attempt of more than `NODES_PER_S` nodes lines are kept in
    memory for some seconds first: each write is an open of a file and a close, too."""

    def __init__(self, node: NodeFolder, shows_rank_0: bool = False) -> None:
        """Begin to watch the folder of `node`, which exists; where the folder is that of a single
        rank, only that rank's log counts. With `shows_rank_0`, `note` also copies to stdout what is
        appended to rank 0's log."""
        self._copy = LogCopy(node.rank_log(0)) if shows_rank_0 else None
        self._node = node
        self._watch = FolderWatch(node.path)
        self._log_name = re.compile(rf"rank-{r'[0-9]+' if node.rank is None else node.rank}\.log")
        self._logs: dict[Path, int] = {}  # the known logs: sizes in bytes, as noted last
        self._lines: list[str] = []  # not written yet
        self._pause_s = AttemptEnv.from_env(os.environ).nnodes / NODES_PER_S  # between two writes
        self._due = time.monotonic() + random.random() * self._pause_s  # not all nodes at once
        self._looks_since_new = 0  # calls of `_all_logs` since the newest log was found
        self._is_unsure = True  # some logs may have changed, and it is not known which
        self._check_at = time.monotonic() + CHECK_AFTER_S

    def note(self) -> None:
        """Note a line for each log that has grown since the last call, append the lines that are
        due to the file ``printed``, and with `shows_rank_0` copy the new part of rank 0's log.

        An OSError of the disk is passed over, and the next call looks at all logs: where a line is
        missing, the output of the ranks is only less well ordered.
        """
        names = None if self._is_unsure else self._take_changed_names()
        try:
            self._is_unsure = True  # until all that follows has worked
            if self._copy and (names is None or self._copy.log.name in names):
                self._copy.copy_new()
            self._note_sizes(self._all_logs() if names is None else self._logs_among(names))
            self._is_unsure = False
        except OSError:
            return

    def note_all(self) -> None:
        """Do what `note` does, but list the folder, look at all logs, also those of which Linux
        tells nothing, and append all lines."""
        self._is_unsure, self._looks_since_new, self._due = True, 0, 0.0
        self.note()

    def _take_changed_names(self) -> set[str] | None:
        """Take the changes of which Linux has told, and return the names of the files that have
        changed; None where they are not known.

        Each `CHECK_EVERY_S` the sizes of the known logs are compared, too. If a log has grown and
        Linux has not told of it, as on a special file system, the watch is ended: later calls
        return None.
        """
        names = self._watch.take_changes()
        if names is not None and time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + CHECK_EVERY_S
            with suppress(OSError):
                sizes = {path: path.stat().st_size for path in self._logs}
                grown = {path.name for path, size in sizes.items() if size > self._logs[path]}
                names |= self._watch.take_changes() or set()  # a log may have grown just now
                if not grown <= names:
                    self._watch.close()
                names |= grown
        return names

    def _note_sizes(self, logs: Iterable[Path]) -> None:
        """Note a line for each of `logs` that has grown since its last line; append the noted lines
        to the file ``printed`` if `_pause_s` is over since the last append, or is a second at most.
        Raise OSError if the disk fails; lines that are not appended are kept."""
        sizes = {path: path.stat().st_size for path in logs}
        grown = {path: size for path, size in sizes.items() if size > self._logs.get(path, 0)}
        now = time.time()
        ranks = {path: path.stem.removeprefix("rank-") for path in grown}
        self._lines += [f"{now:.3f} {ranks[path]} {size}\n" for path, size in grown.items()]
        self._logs |= grown
        if not self._lines or (self._pause_s > 1 and time.monotonic() < self._due):
            return
        with open(self._node.printed, "a", opener=_open_no_link) as file:
            file.write("".join(self._lines))
        self._lines.clear()
        self._due = time.monotonic() + self._pause_s

    def _logs_among(self, names: Iterable[str]) -> list[Path]:
        """Return the paths of those `names` that are logs of the supervisor's ranks, sorted by
        name."""
        return [self._node.path / name for name in sorted(names) if self._log_name.fullmatch(name)]

    def _all_logs(self) -> list[Path]:
        """List the folder if that is due, add new logs of the supervisor's ranks to the known ones,
        and return all known ones. The folder is listed at each call until there is a log, and at
        the `LIST_EVERY` calls after a new log, since other workers may start seconds later; after
        that at each `LIST_EVERY`-th call. Raise OSError if the disk fails."""
        looks = self._looks_since_new
        self._looks_since_new += 1
        if not self._logs or looks < LIST_EVERY or looks % LIST_EVERY == 0:
            for path in self._logs_among(os.listdir(self._node.path)):
                if path not in self._logs:
                    self._logs[path] = 0
                    self._looks_since_new = 0
        return list(self._logs)
