"""A copy of rank 0's log, and when the logs of a node's workers have grown.

The workers write to their logs themselves, so nothing of what they print can be lost or held up by
somebody in between; but a line has no time of its own. So about once a second their supervisor
notes which logs have grown, and to what size. By this, lines of many ranks are put in order.
"""

from __future__ import annotations

import time
from pathlib import Path

from hpc_ddp.core.console.terminal import write_output
from hpc_ddp.core.job.attempt_folder import NodeFolder

LIST_EVERY = 10  # looks; listing a folder costs an NFS server more than asking for sizes


class LogCopy:
    """Copies what a log gets to this process's output."""

    def __init__(self, log: Path) -> None:
        """Begin behind what the log has by now, of a try at another port."""
        self._log = log
        self._position = log.stat().st_size if log.exists() else 0

    def show(self) -> None:
        """Copy the new bytes; a log that can't be read is tried again at the next call."""
        try:
            with open(self._log, "rb") as file:
                file.seek(self._position)
                new = file.read()
        except OSError:  # not there yet, or not now
            return
        self._position += len(new)
        write_output(new)


class Growth:
    """Appends to a node's ``printed``: unix seconds, rank, and bytes of its log by then."""

    def __init__(self, node: NodeFolder, shows_rank_0: bool = False) -> None:
        """Begin with no known log; `node` may be of one rank alone. With `shows_rank_0`, `note`
        shows what rank 0's log gets, too."""
        self._shown = LogCopy(node.rank_log(0)) if shows_rank_0 else None
        self._node = node
        self._logs: dict[Path, int] = {}
        self._looks_since_new = 0

    def note(self) -> None:
        """Append a line for each log that has grown since the last call; nothing if none has.

        An OSError is passed over, and the next call tries again: without a line, the output of the
        ranks is only less well ordered.
        """
        if self._shown:
            self._shown.show()
        try:
            self._list()
            sizes = {path: path.stat().st_size for path in self._logs}
            grown = [path for path, size in sizes.items() if size > self._logs[path]]
            if not grown:
                return
            now = time.time()
            ranks = (path.stem.removeprefix("rank-") for path in grown)
            lines = [
                f"{now:.3f} {rank} {sizes[path]}\n" for rank, path in zip(ranks, grown, strict=True)
            ]
            with open(self._node.printed, "a") as file:
                file.write("".join(lines))
            self._logs = sizes
        except OSError:
            return

    def _list(self) -> None:
        """Add new logs of the supervisor's ranks to `_logs`. Every call looks for them until there
        is one, and `LIST_EVERY` times after the newest, since other workers may come seconds
        later; then each `LIST_EVERY`-th call. Raise OSError if the disk fails."""
        since = self._looks_since_new
        self._looks_since_new += 1
        if self._logs and since >= LIST_EVERY and since % LIST_EVERY:
            return
        pattern = "rank-*.log" if self._node.rank is None else f"rank-{self._node.rank}.log"
        for path in sorted(self._node.path.glob(pattern)):
            if path not in self._logs:
                self._logs[path] = 0
                self._looks_since_new = 0
