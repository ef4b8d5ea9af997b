"""Notices that a rank hangs, and ends it so that one can see where.

One stuck rank makes all others wait for it in a collective, so each rank watches only itself,
and all of them end with their stacks written. A wait that takes Python's lock with it (C code
of an extension) stops our thread too: for that one faulthandler has a timer in C.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch._C import _distributed_c10d

from hpc_ddp.core import process
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.file_io import make_folders
from hpc_ddp.core.job.attempt_folder import NodeFolder
from hpc_ddp.training.data.batch_plan import Position

dist: Any = torch_distributed  # some of what is used here has no types
c10d: Any = _distributed_c10d
_last_beat = 0.0  # on the monotonic clock; one per process, as faulthandler's timer is
_shown: int | None = None  # the file of the stacks for `hpc-ddp attach`


def beat() -> None:
    """Note the present time as this process's last sign of progress, for its `Watchdog`. Costs less
    than a microsecond."""
    global _last_beat
    _last_beat = time.monotonic()


def show_stacks_when_asked() -> None:
    """Have the signal `process.SHOW_STACKS` write all threads' stacks to a file in memory, which
    `hpc-ddp attach --py-spy` reads. A second call of a process does nothing, nor does a call where
    the system has no files in memory."""
    global _shown
    if sys.platform == "linux" and _shown is None:
        with suppress(OSError):
            # Not on a disk: the process may stand still because of a disk.
            _shown = process.memory_file(process.STACKS)
            faulthandler.register(process.SHOW_STACKS, _shown)


class HangError(RuntimeError):
    """The training has stood still for too long. Raised nowhere: the main thread is stuck."""

    __module__ = "builtins"  # so that it is shown by its plain name


class Watchdog:
    """Watches for a hang from the end of the first step, which may take long to compile, to `end`.

    Parameters
    ----------
    hang_after_s
        seconds without a `beat` after which this rank counts as hung; None or 0 for no watching
    node
        the node's folder of this attempt, for the stacks and the dump
    rank
        this process's
    position
        the run's, whose step the report names
    device
        the last collectives on this device are dumped
    report
        called with an error and its traceback, for the journal and for the log
    """

    def __init__(
        self,
        hang_after_s: float | None,
        node: NodeFolder,
        rank: int,
        position: Position,
        device: torch.device,
        report: Callable[[BaseException, str], None],
    ) -> None:
        """Prepare the watch, which the first `step_done` begins; call `show_stacks_when_asked`."""
        self._hang_after_s = hang_after_s or 0.0
        # For which a hung rank waits for its peers to find the hang and write their stacks, too:
        # their last beats lie up to a step apart, and the first rank to exit ends all.
        self._grace_s = min(60.0, 2.0 + self._hang_after_s / 30)
        self._poll_s = self._grace_s / 6
        self._node, self._rank, self._position = node, rank, position
        self._device, self._report = device, report
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._stacks: int | None = None  # the file's descriptor: what faulthandler works on
        show_stacks_when_asked()

    def step_done(self) -> None:
        """Note progress (`beat`). The first call also makes the file of stacks and starts to watch,
        by a thread and a timer in C; if the disk refuses the file, the next call tries again."""
        beat()
        if self._stacks is None and self._hang_after_s > 0:
            # Opened now, since nothing can be opened once Python's lock is gone.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            try:
                make_folders(self._node.path)
                self._stacks = os.open(self._node.stacks(self._rank), flags, 0o600)
            except OSError:  # a disk in trouble; the next step tries again
                return
            self._arm_timer(0.0)
            self._thread = threading.Thread(target=self._watch, name="hpc-ddp watchdog")
            self._thread.daemon = True
            self._thread.start()

    def end(self) -> None:
        """End the watch, which waits for its thread, and remove the file of stacks. A second call
        does nothing."""
        self._ended.set()
        if self._thread is None or self._stacks is None:
            return
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        stacks, self._stacks = self._stacks, None
        os.close(stacks)
        with suppress(OSError):
            self._node.stacks(self._rank).unlink()

    def _arm_timer(self, quiet_s: float) -> None:
        """Set the timer in C, in place of the one before: it writes the stacks and exits with code
        1, unless the thread calls this again in time.

        `quiet_s` is the time since the last beat, in seconds.
        """
        # Later than the thread itself would end the process: its report says more.
        left_s = max(self._hang_after_s - quiet_s, 0.0) + self._grace_s + self._poll_s
        assert self._stacks is not None
        faulthandler.dump_traceback_later(left_s, exit=True, file=self._stacks)

    def _watch(self) -> None:
        """Until `end`: set the timer anew every `_poll_s` seconds, and end the process if the last
        beat is `hang_after_s` seconds ago. The thread runs this."""
        while not self._ended.wait(self._poll_s):
            quiet_s = time.monotonic() - _last_beat
            self._arm_timer(quiet_s)
            if quiet_s >= self._hang_after_s:
                self._report_and_exit()

    def _report_and_exit(self) -> None:
        """Write the stacks, report the hang, and dump the last collectives; after the grace time,
        in which the peers do the same, exit with 1. It never returns."""
        ends_at = time.monotonic() + self._grace_s
        assert self._stacks is not None
        faulthandler.dump_traceback(self._stacks)
        error = HangError(
            f"no step for {self._hang_after_s:g} s at step {self._position.step};"
            f" stacks in {self._node.stacks(self._rank)}"
        )
        self._report(error, _traceback_of_main(error))
        try:
            self._node.flight(self._rank).write_bytes(flight_recorder(self._device))
        except Exception as no_dump:
            say(f"no dump of the flight recorder: {no_dump}")
        sys.stderr.flush()
        time.sleep(max(ends_at - time.monotonic(), 0.0))
        os._exit(1)


def flight_recorder(device: torch.device) -> bytes:
    """Return torch's record of the last collectives by the backend that sends a device's tensors:
    a pickle, as bytes.

    The record is on by default from torch 2.15 (``TORCH_FR_BUFFER_SIZE`` entries); 2.9 records NCCL
    only. The default process group must have a backend for the device; else torch's errors come
    through.

    Raises
    ------
    NotImplementedError
        this build of torch has no record of that backend
    """
    backend = dist.group.WORLD._get_backend(device)
    # From 2.15 on the backend "nccl" may be another implementation, whose record is elsewhere.
    legacy = getattr(dist, "ProcessGroupNCCL", None)
    if legacy and isinstance(backend, legacy):
        record: bytes = c10d._dump_nccl_trace()
    else:
        name = backend.name()
        try:
            record = c10d._dump_fr_trace(**({} if name == "gloo" else {"backend": name}))
        except (AttributeError, TypeError):  # torch's text would be the function's signature
            raise NotImplementedError(
                f"torch {torch.__version__} records no collectives of {name}"
            ) from None
    return record


def _traceback_of_main(error: HangError) -> str:
    """Return the main thread's stack, from the script's first frame on, in the form of the
    traceback of `error`."""
    innermost = sys._current_frames()[threading.main_thread().ident or 0]
    frames = [*traceback.walk_stack(innermost)][::-1]  # the outermost first
    script = vars(sys.modules["__main__"])
    # Frames of hpc-ddp in a forked worker, and runpy's of a script by -m, come before the script's.
    first = next((i for i, (frame, _) in enumerate(frames) if frame.f_globals is script), 0)
    lines = "".join(traceback.StackSummary.extract(iter(frames[first:])).format())
    return f"Traceback (most recent call last):\n{lines}HangError: {error}\n"
