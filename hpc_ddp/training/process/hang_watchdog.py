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
from hpc_ddp.training.data.order import Position

dist: Any = torch_distributed  # some of what is used here has no types
c10d: Any = _distributed_c10d
_last_beat = 0.0  # on the monotonic clock; one per process, as faulthandler's timer is
_shown: int | None = None  # the file of the stacks for `hpc-ddp attach`


def beat() -> None:
    """Note, for the process's `Watchdog`, that the training goes on. Costs less than a
    microsecond."""
    global _last_beat
    _last_beat = time.monotonic()


def show_stacks_when_asked() -> None:
    """Have a signal write the stacks to the file in memory that `hpc-ddp attach --py-spy` reads.

    The signal is `process.SHOW_STACKS`. Once per process, and only where there are files in memory.
    """
    global _shown
    if sys.platform == "linux" and _shown is None:
        with suppress(OSError):
            _shown = process.memory_file(process.STACKS)  # a disk may be why it stands still
            faulthandler.register(process.SHOW_STACKS, _shown)


class HangError(RuntimeError):
    """The training has stood still for too long. Raised nowhere: the main thread is stuck."""

    __module__ = "builtins"  # so that it is shown by its plain name


class Watchdog:
    """Watches for a hang from the end of the first step, which may take long to compile, to `end`.

    Parameters
    ----------
    hang_after_s
        seconds without a `beat` after which this rank hangs; None or 0 for no watching
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
        """Prepare the watch, which begins with `step_done`, and call `show_stacks_when_asked`;
        `node` is the folder for the stacks, `position` the run's, which the report names."""
        self._hang_after_s = hang_after_s or 0.0
        # The ranks' last beats lie up to a step apart, and the first one to exit ends all.
        self._grace_s = min(60.0, 2.0 + self._hang_after_s / 30)
        self._poll_s = self._grace_s / 6
        self._node, self._rank, self._position = node, rank, position
        self._device, self._report = device, report
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._stacks: int | None = None  # the file's descriptor: what faulthandler works on
        show_stacks_when_asked()

    def step_done(self) -> None:
        """Beat; the first time also make the file of stacks and start to watch, by a thread and a
        timer in C. A disk that refuses the file is tried again at the next step."""
        beat()
        if self._stacks is None and self._hang_after_s > 0:
            # Opened now, since nothing can be opened once Python's lock is gone.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            try:
                make_folders(self._node.path)
                self._stacks = os.open(self._node.stacks(self._rank), flags, 0o600)
            except OSError:  # a disk in trouble; the next step tries again
                return
            self._arm(0.0)
            self._thread = threading.Thread(target=self._watch, name="hpc-ddp watchdog")
            self._thread.daemon = True
            self._thread.start()

    def end(self) -> None:
        """Watch no more, and remove the file of stacks: what comes now is not training. A second
        call does nothing."""
        self._ended.set()
        if self._thread is None or self._stacks is None:
            return
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        stacks, self._stacks = self._stacks, None
        os.close(stacks)
        with suppress(OSError):
            self._node.stacks(self._rank).unlink()

    def _arm(self, quiet_s: float) -> None:
        """Have a timer in C write the stacks and exit with code 1, unless the thread arms it anew
        in time.

        `quiet_s` is the time since the last beat, in seconds.
        """
        left_s = max(self._hang_after_s - quiet_s, 0.0) + self._grace_s + self._poll_s
        assert self._stacks is not None
        faulthandler.dump_traceback_later(left_s, exit=True, file=self._stacks)

    def _watch(self) -> None:
        """Check now and then how long the last beat is ago; run by the thread."""
        while not self._ended.wait(self._poll_s):
            quiet_s = time.monotonic() - _last_beat
            self._arm(quiet_s)
            if quiet_s >= self._hang_after_s:
                self._hung()

    def _hung(self) -> None:
        """Write the stacks, report the hang, dump the last collectives, and exit with 1.

        It exits only after the grace time, so that the peers do the same. It never returns.
        """
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
    """Return the pickled record of the last collectives of what carries a device's tensors.

    The record is on by default from torch 2.15 (``TORCH_FR_BUFFER_SIZE`` entries); 2.9 records NCCL
    only. A process group with a backend for the device must exist; else torch's errors come
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
    """Return the main thread's stack, from the script's first frame on, in the form of an
    exception's traceback."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    frames = [*traceback.walk_stack(frame)][::-1]
    script = vars(sys.modules["__main__"])
    # Before it come those of hpc-ddp in a forked worker, and runpy's of a script by -m.
    first = next((i for i, (frame, _) in enumerate(frames) if frame.f_globals is script), 0)
    lines = "".join(traceback.StackSummary.extract(iter(frames[first:])).format())
    return f"Traceback (most recent call last):\n{lines}HangError: {error}\n"
