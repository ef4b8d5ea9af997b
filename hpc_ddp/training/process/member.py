"""One process of a run: what all ways to train have in common, whoever makes the process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from hpc_ddp.core import process
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.file_io import patiently
from hpc_ddp.core.journal import goodput
from hpc_ddp.core.journal.events import JournalEvent, WorkerStarted
from hpc_ddp.training.checkpoint.save import Checkpoints
from hpc_ddp.training.checkpoint.schedule import SaveSchedule, between_failures, slowest_save
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.options import Options
from hpc_ddp.training.process import run_directory
from hpc_ddp.training.process.control import Control
from hpc_ddp.training.process.environment import DistEnv, LaunchEnv
from hpc_ddp.training.process.failure import FailureHook, drop_failing_prints
from hpc_ddp.training.process.hang_watchdog import Watchdog
from hpc_ddp.training.stops.consensus import StopConsensus
from hpc_ddp.training.stops.loader_workers import outlive_notices
from hpc_ddp.training.stops.signals import Notices
from hpc_ddp.training.telemetry.metrics import Metrics, check_values
from hpc_ddp.training.telemetry.step_timing import StepTimer


class Member:
    """Listens for notices, opens the run's folder, and agrees with its peers on saves and stops.

    `rank` and `world_size` are this process's, `folder` is the run's, `position` where the training
    is.
    """

    def __init__(self, options: Options) -> None:
        """Install the handlers of exceptions and signals, have loader workers outlive signals and,
        below a supervisor, prints a full disk; check the options. Handlers first: the rest takes
        seconds, and may wait for peers. Raise UsageError for wrong variables or options,
        ValueError outside of the main thread."""
        self._called = time.time()  # unix seconds, for the journal
        self._hook = FailureHook()
        self._hook.install()
        self._info, self._env = DistEnv.from_env(), LaunchEnv.from_env()
        self._hook.info, self._hook.node = self._info, self._env.node
        if self._env.notice is not None:
            drop_failing_prints()
        self._notices = Notices(self._env.notice, self._env.local_notice)
        self._notices.install()
        outlive_notices()
        self._options = options.checked(self._env)
        self.position = Position()
        self._checked_values: set[str] = set()  # names of which a first value was checked

    def _open_run(self, control: Control) -> None:
        """Open the run's folder and the journal, once the ranks have met; on rank 0 journal the
        start, and watch for a cancel and the end time. Every rank must call it. Raises as
        `run_directory.find`."""
        self._control = control
        self.rank, self.world_size = control.rank, control.world_size
        self._hook.install()
        self.folder, attempt = run_directory.find(self._env, self._info, control)
        self._journal = self.folder.journal(f"rank-{self.rank}", attempt)
        self._hook.journal = self._journal
        self._hook.position = self.position
        if self.rank == 0:
            imports = process.imports_ahead or (None, None)
            self._journal.write(WorkerStarted(process.began_at(), self._called, *imports))
            self._notices.watch_for_cancel(self.folder.cancelled)
            # One clock: hosts' clocks differ, and rank 0 alone knows how long a whole save takes.
            self._notices.watch_end_time(self._env.end_time, self.folder.attempt(attempt).end_time)

    def _read_history(self) -> list[JournalEvent]:
        """Return the journal so far; [] with a message if the disk does not answer for a minute.
        Estimates for the schedule hang on it, and which steps `on_metrics` passes over."""
        try:
            return patiently(self.folder.events)
        except OSError as error:
            self._say(f"the journal can't be read, and earlier saves are not known: {error}")
            return []

    def _prepare_decisions(self, checkpoints: Checkpoints, device: torch.device) -> Sequence[str]:
        """Make the parts that decide, time the steps and watch for a hang; every rank must call it.
        Return the names of the ranks' nodes, by rank, on rank 0; [] elsewhere."""
        options, attempt = self._options, self._journal.attempt
        history = self._read_history() if self.rank == 0 and attempt else []
        self._schedule = SaveSchedule(
            checkpoints,
            self.rank,
            options.save_every,
            options.save_every_steps,
            slowest_save_s=slowest_save(history),
            failure_interval_s=between_failures(history),
        )
        nodes = self._control.to_first(self._env.node)
        self._timer = StepTimer(self._control, self._journal, self.position, device, nodes)
        self._consensus = StopConsensus(
            self._control, self._notices, self._schedule, self._timer, device
        )
        self._watchdog = Watchdog(
            options.hang_after,
            self.folder.attempt(attempt).node(self._env.node),
            self.rank,
            self.position,
            device,
            self._hook.report,
        )
        return nodes

    def _make_metrics(
        self,
        nodes: Sequence[str],
        use_per_sample_s: float | None = None,
        listeners: Sequence[Callable[[dict[str, Any]], None]] = (),
    ) -> None:
        """Make the part that journals values; see `Metrics`. `nodes` are the ranks', on rank 0."""
        hosts = sorted(set(nodes))
        self._metrics = Metrics(self._journal, self.world_size, hosts, use_per_sample_s, listeners)

    def _check_values(self, values: dict[str, Any]) -> None:
        """Check the values of names that have had none so far: raise UsageError for one that is no
        number, or whose name is the journal's. Every rank checks: a mistake is to end all."""
        if not values.keys() <= self._checked_values:
            check_values(values)
            self._checked_values |= values.keys()

    def _end_journal(self, event: JournalEvent | None = None) -> None:
        """On rank 0 write out all values, then the event if there is one; waits for the disk, and
        raises as `Metrics.flush`."""
        if self.rank == 0:
            self._metrics.flush()
            self._journal.drain()
            if event:
                self._journal.write_surely(event)

    def _say(self, text: str) -> None:
        """Print a message of hpc-ddp's on rank 0."""
        if self.rank == 0:
            say(text)

    def _say_stop(self) -> None:
        """Print that the ranks have stopped and saved."""
        self._say(f"stopped and saved at step {self.position.step}; it can go on from there")

    def _say_goodput(self) -> None:
        """Print the run's goodput, on rank 0, which alone calls it; nothing if its journal can't be
        read."""
        with suppress(OSError):  # all is done: no reason left to fail
            say(goodput.line(goodput.account(self.folder.events(), time.time())))
