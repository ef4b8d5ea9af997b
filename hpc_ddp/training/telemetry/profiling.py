"""A trace of some steps, by torch's profiler."""

from __future__ import annotations

import secrets
from pathlib import Path

import torch

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.file_io import make_folders


class Profiler:
    """Traces the steps of a window (first, last): numbers of steps of this attempt, which count
    from 1. `first` is at least 2.

    Writes a Chrome trace to `path`, whose folder it makes; replaces a file there. Prints the path
    if it `announces`.
    """

    def __init__(self, window: tuple[int, ...] | None, path: Path, announces: bool) -> None:
        """Prepare the trace of the steps of `window`; None traces nothing."""
        self._first, self._last = window or (0, 0)  # 0 is no step's number
        self._path, self._announces = path, announces
        self._steps = 0
        self._profile: torch.profiler.profile | None = None

    def count_step(self) -> None:
        """Count a step that has ended. Begin the trace behind the step before the window; end and
        write it behind the window's last step."""
        self._steps += 1
        if self._steps == self._first - 1:
            self._profile = torch.profiler.profile()
            self._profile.start()
        elif self._steps == self._last:
            self.end()

    def end(self) -> None:
        """End the trace and write it, if one is under way; also called as the run ends, perhaps
        within the window. Print an OSError in place of raising it: a trace ends no training."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        try:
            make_folders(self._path.parent)
            # A random name and a replace: a link at `path`, of another user who may write to the
            # folder, is replaced and not followed.
            draft = self._path.with_name(f".{secrets.token_hex(8)}-{self._path.name}")
            profile.export_chrome_trace(str(draft))
            draft.replace(self._path)
        except OSError as error:
            say(f"the profile can't be written: {error}")
            return
        if self._announces:
            steps = f"steps {self._first} to {min(self._steps, self._last)} of this attempt"
            say(f"profile of {steps}: {self._path}")
