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
from hpc_ddp.training.checkpoint.schedule import SaveSchedule, slowest_save, time_between_failures
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.options import Options
from hpc_ddp.training.process import run_directory
from hpc_ddp.training.process.environment import DistEnv, LaunchEnv
from hpc_ddp.training.process.failure import FailureHook, drop_failing_prints
from hpc_ddp.training.process.hang_watchdog import Watchdog
from hpc_ddp.training.process.rank_messages import Control
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
        """Install the handlers of exceptions and signals; have loader workers outlive a notice's
        signal; below a supervisor, have prints lose text rather than fail (`drop_failing_prints`).
        Check `options`, of which the environment's variables override some. Raise UsageError for
        wrong variables or options, ValueError outside of the main thread."""
        self._called = time.time()  # unix seconds, for the journal
        self._hook = FailureHook()  # first: the rest of a start takes seconds, and waits for peers
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
        """Open the run's folder and the journal, once the ranks have joined the process group, and
        keep `control` for messages to the peers. On rank 0 journal the start, and watch for a
        cancel and the end time. It is a collective. Raises as `run_directory.open_run`."""
        self._control = control
        self.rank, self.world_size = control.rank, control.world_size
        self._hook.install()  # again: torch has put its own hook around it
        self.folder, attempt = run_directory.open_run(self._env, self._info, control)
        self._journal = self.folder.journal(f"rank-{self.rank}", attempt)
        self._hook.journal = self._journal
        self._hook.position = self.position
        if self.rank == 0:
            imports = process.imports_ahead or (None, None)  # begin and end, in a fork server
            self._journal.write(WorkerStarted(process.began_at(), self._called, *imports))
            self._notices.watch_for_cancel(self.folder.cancelled)
            # One clock: hosts' clocks differ, and rank 0 alone knows how long a whole save takes.
            self._notices.watch_end_time(self._env.end_time, self.folder.attempt(attempt).end_time)

    def _read_history(self) -> list[JournalEvent]:
        """Return the events of the run's journal so far; [] if the disk does not answer for a
        minute, which rank 0 prints. The schedule's estimates depend on them, and the steps that
        `on_metrics` passes over."""
        try:
            return patiently(self.folder.events)
        except OSError as error:
            self._say(f"the journal can't be read, and earlier saves are not known: {error}")
            return []

    def _prepare_decisions(self, checkpoints: Checkpoints, device: torch.device) -> Sequence[str]:
        """Make the parts that decide on saves and stops, time the steps and watch for a hang, which
        are `_schedule`, `_consensus`, `_timer` and `_watchdog`. Return the names of the ranks'
        nodes, by rank, on rank 0; [] on other ranks. It is a collective: raise RuntimeError if a
        peer is gone."""
        options, attempt = self._options, self._journal.attempt
        history = self._read_history() if self.rank == 0 and attempt else []
        self._schedule = SaveSchedule(
            checkpoints,
            self.rank,
            options.save_every,
            options.save_every_steps,
            slowest_save_s=slowest_save(history),
            failure_interval_s=time_between_failures(history),
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
        """Make the part that journals the steps' values. `nodes` are the names of the ranks' nodes,
        on rank 0; the other arguments are those of `Metrics`."""
        hosts = sorted(set(nodes))
        self._metrics = Metrics(self._journal, self.world_size, hosts, use_per_sample_s, listeners)

    def _check_values(self, values: dict[str, Any]) -> None:
        """Raise UsageError for a value that is no number, or whose name the journal reserves. If no
        name is new, nothing is checked. All ranks call it, so that a mistake ends them all."""
        if not values.keys() <= self._checked_values:
            check_values(values)
            self._checked_values |= values.keys()

    def _end_journal(self, event: JournalEvent | None = None) -> None:
        """On rank 0 journal all values that were added, then the event if there is one; wait for
        the disk. Do nothing on other ranks. Raises as `Metrics.flush`."""
        if self.rank == 0:
            self._metrics.flush()
            self._journal.drain()
            if event:
                self._journal.write_surely(event)

    def _say(self, text: str) -> None:
        """Print a message of hpc-ddp's, on rank 0 alone."""
        if self.rank == 0:
            say(text)

    def _say_stop(self) -> None:
        """Print, on rank 0 alone, that the ranks have stopped and saved."""
        self._say(f"stopped and saved at step {self.position.step}; it can go on from there")

    def _say_goodput(self) -> None:
        """Print the run's goodput, or nothing if the journal can't be read. Called on rank 0."""
        with suppress(OSError):  # all is done: no reason left to fail
            say(goodput.line(goodput.account(self.folder.events(), time.time())))
