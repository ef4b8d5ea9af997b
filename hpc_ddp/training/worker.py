"""A worker: joined with its peers, and made of the parts of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hpc_ddp.core import process
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import patiently
from hpc_ddp.core.journal import goodput
from hpc_ddp.core.journal.events import JournalEvent, Stopped, WorkerStarted
from hpc_ddp.training.checkpoint.manager import CheckpointManager
from hpc_ddp.training.checkpoint.restore import non_finite_error
from hpc_ddp.training.checkpoint.save import Checkpoints
from hpc_ddp.training.checkpoint.schedule import (
    Retention,
    SaveSchedule,
    between_failures,
    slowest_save,
)
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.devices import choose_devices
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.precision import Precision, make_deterministic
from hpc_ddp.training.options import Options
from hpc_ddp.training.process import process_group, run_directory
from hpc_ddp.training.process.environment import DistEnv, LaunchEnv
from hpc_ddp.training.process.failure import FailureHook, leave_quickly, make_patient
from hpc_ddp.training.process.hang_watchdog import Watchdog, beat
from hpc_ddp.training.stops.consensus import (
    StopConsensus,
)
from hpc_ddp.training.stops.signals import REASONS, Notices
from hpc_ddp.training.telemetry.metrics import Metrics
from hpc_ddp.training.telemetry.profiling import Profiler, use_per_sample
from hpc_ddp.training.telemetry.sinks import ProgressLines, TensorBoardSink
from hpc_ddp.training.telemetry.step_timing import StepTimer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


LOOK_EVERY = 10  # exchanges, so about a second, and with slow steps every tenth


class Worker:
    """Builds the parts of a run in the order in which a worker comes to life, and ends them.

    `device` is this rank's (`devices` all of them), `folder` the run's, `position` where the
    training is.
    """

    def __init__(self, options: Options) -> None:
        """Do what `start` promises, and raise as it does; `options` are the script's.

        Signals first: the rest takes seconds, and may wait for peers.
        """
        called = time.time()
        self._hook = FailureHook()
        self._hook.install()
        self._info, env = DistEnv.from_env(), LaunchEnv.from_env()
        self._hook.info, self._hook.node = self._info, env.node
        if env.notice is not None:
            make_patient()
        self._notices = Notices(env.notice)
        self._notices.install()
        options = options.checked(env)
        self._join(options, env, called)
        self._prepare(options, env)
        self._over = False
        self._look_at = 0  # the number of exchanges
        self._look_answers_at: int | None = None

    def _join(self, options: Options, env: LaunchEnv, called: float) -> None:
        """Join the process group, and open the run's folder; every rank must call it. `called` is
        when `start` was, in unix seconds. Raises as `start`."""
        info = self._info
        self.rank, self.world_size, self.seed = info.rank, info.world_size, options.seed
        if options.deterministic:
            make_deterministic()
        self._dims = ParallelDims(info.rank, info.world_size, options.tp, options.pp)
        self.devices = choose_devices(info, options.devices_per_worker)
        self.device = self.devices[0]
        self._control = process_group.join(info, self.devices, options.hang_after, options.backend)
        self._hook.install()
        self.folder, attempt = run_directory.find(env, info, self._control)
        self._journal = self.folder.journal(f"rank-{info.rank}", attempt)
        self._hook.journal = self._journal
        if info.rank == 0:
            self._journal.write(WorkerStarted(process.began_at(), called))
            self._notices.watch_for_cancel(self.folder.cancelled)
            # One clock: hosts' clocks differ, and rank 0 alone knows how long a whole save takes.
            self._notices.watch_end_time(env.end_time, self.folder.attempt(attempt).end_time)

    def _read_history(self) -> list[JournalEvent]:
        """Return the journal of earlier attempts; [] with a message if the disk does not answer for
        a minute. Only estimates for the schedule hang on it."""
        try:
            return patiently(self.folder.events)
        except OSError as error:
            self._say(f"the journal can't be read, and earlier saves are not known: {error}")
            return []

    def _prepare(self, options: Options, env: LaunchEnv) -> None:
        """Make the parts of the run that save, stop, measure and watch, and seed the generators;
        every rank must call it."""
        control, attempt = self._control, self._journal.attempt
        self.position = self._hook.position = Position()
        rng.seed_all(options.seed, self.devices)
        self._prepare_saves(options)
        history = self._read_history() if self.rank == 0 and attempt else []
        self._schedule = SaveSchedule(
            self._checkpoints,
            self.rank,
            options.save_every,
            options.save_every_steps,
            slowest_save_s=slowest_save(history),
            failure_interval_s=between_failures(history),
        )
        nodes = control.to_first(env.node)
        self._timer = StepTimer(control, self._journal, self.position, self.device, nodes)
        self._consensus = StopConsensus(control, self._notices, self._schedule, self._timer)
        self._watchdog = Watchdog(
            options.hang_after,
            self.folder.attempt(attempt).node(env.node),
            self.rank,
            self.position,
            self.device,
            self._hook.report,
        )
        self._precision = Precision(options.precision, self.device, options.stop_on_nan, self._dims)
        self._prepare_telemetry(options, sorted(set(nodes)))

    def _prepare_saves(self, options: Options) -> None:
        """Make the parts that save; every rank must call it: a process group is made."""
        self._checkpoints = Checkpoints(
            self.folder,
            self._journal.attempt,
            self._control,
            process_group.Control(self._info, self._control.timeout),
            self._journal,
            Retention(options.keep_last, options.keep_every),
        )
        self._manager = CheckpointManager(
            self._checkpoints,
            self.position,
            self.devices,
            options.seed,
            self._dims,
            options.stop_on_nan,
        )

    def _prepare_telemetry(self, options: Options, hosts: list[str]) -> None:
        """Make the parts that measure; `hosts` are the names of the run's nodes, on rank 0."""
        is_first, path = self.rank == 0, self.folder.path
        self._board = self._progress = None
        if options.tensorboard and is_first:
            self._board = TensorBoardSink(path / "tensorboard", self.position)
        if options.progress and is_first:
            self._progress = ProgressLines()
        self._metrics = Metrics(
            self._journal,
            self.world_size,
            hosts,
            use_per_sample(options, self.device, self.world_size * len(self.devices), self._say),
            [sink.show for sink in (self._board, self._progress) if sink is not None],
        )
        trace = f"attempt-{self._journal.attempt}-rank-{self.rank}.json.gz"
        self._profiler = Profiler(options.profile, path / "profile" / trace, announces=is_first)

    def _say(self, text: str) -> None:
        """Print a message of hpc-ddp's on rank 0."""
        if self.rank == 0:
            say(text)

    def _refuse_non_finite(self) -> None:
        """Raise HpcDdpError if the last look at the weights found NaN or infinity; its answer is
        taken by that. Raise OSError if then the checkpoints can't be listed."""
        if self._precision.has_non_finite():
            raise non_finite_error(self.folder, self.position.step)

    def _stop(self, reason: int) -> NoReturn:
        """Save, journal the stop, and raise SystemExit with 0, at which the process ends without a
        teardown; `reason` is a key of `REASONS`. Raises as `_end`."""
        source = self._notices.source
        self._end(Stopped(self.position.step, REASONS[reason], source or None))
        leave_quickly()
        raise SystemExit(0)

    def _end(self, event: JournalEvent) -> None:
        """Save, journal the event, and leave the process group; every rank must call it. Once done,
        nothing.

        Raise HpcDdpError if a weight is not finite or the save fails, SupersededError for a later
        attempt.
        """
        if self._over:
            return
        is_stop = isinstance(event, Stopped)
        self._precision.look()
        self._refuse_non_finite()
        self._manager.save_surely()
        if not is_stop:  # a stop has no time for it, and the next start does it
            self._checkpoints.tidy()
        self._watchdog.end()
        if self.rank == 0:
            self._metrics.flush()
            self._journal.drain()
            self._journal.write_surely(event)
        for end in [sink.end for sink in (self._board, self._progress, self._profiler) if sink]:
            end()
        self._over = True
        self._notices.end(then_exit=is_stop)
        process_group.leave(self._control, self.device, then_exit=is_stop)
        if self.rank == 0:
            if is_stop:
                self._say(
                    f"stopped and saved at step {self.position.step}; it can go on from there"
                )
            self._say_goodput()

    def _say_goodput(self) -> None:
        """Print the run's goodput; nothing if its journal can't be read."""
        with suppress(OSError):  # all is done: no reason left to fail
            say(goodput.line(goodput.account(self.folder.events(), time.time())))

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        """Return the sums of numbers over all ranks, in double precision. All ranks call it.

        One of the ranks that take the same samples counts: with pipelines, one of the last stage.
        Tensors have one number each: `float` raises RuntimeError, ValueError or TypeError for other
        values, and the other ranks then wait.
        """
        counts = self._dims.counts
        numbers_here = [float(value) if counts else 0.0 for value in values]
        sums = torch.tensor(numbers_here, dtype=torch.float64, device="cpu")
        self._control.sum(sums)
        beat()
        numbers: list[float] = sums.tolist()
        return numbers

    @property
    def resumed(self) -> bool:
        """Whether `track` has taken up a checkpoint: False in the first start of a run. Raises
        UsageError before `track`."""
        if not self._manager.tracked:
            raise UsageError(
                "run.resumed was read before run.track, which takes up the checkpoint",
                hint="weights that are loaded before run.track need no question: a checkpoint"
                " replaces them",
            )
        return self._manager.resumed

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on each: ``max(run.gather(x))``. They can be
        pickled, and are small. All ranks call it."""
        values: list[Any] = self._control.from_first(self._control.to_first(value))
        beat()
        return values

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._control.barrier()
        beat()

    @contextmanager
    def rank_0_first(self) -> Iterator[None]:
        """Run the block on rank 0, then on the others: for a download, or a cache on a shared disk.
        All ranks enter. An error on rank 0 ends the others, too: the launcher ends them."""
        if self.rank > 0:
            self.barrier()
        yield
        if self.rank == 0:
            self.barrier()

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave the time of the block out of the steps' times, as that of an evaluation is: for an
        upload, or a plot. It waits for no other rank."""
        yield
        beat()
        self._timer.start_step()
        self._consensus.end_pause()

    def on_metrics(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Call `listener` on rank 0 with each line of metrics, about two a second: the values of
        `step` as numbers, with ``step``, ``epoch`` and ``samples_per_s``. An error of it ends the
        run."""
        self._metrics.listen(listener)

    def print(self, *values: Any) -> None:
        """Print values as Python's `print` does, on rank 0 only, at once."""
        if self.rank == 0:
            print(*values, flush=True)

    @property
    def tensorboard(self) -> SummaryWriter | None:
        """TensorBoard's writer on rank 0, with `tensorboard` of `start`, else None; for use after
        `track`. The first use makes its files, and raises OSError if the disk refuses."""
        return self._board.writer if self._board else None

    def _watch_weights(self, exchanges: int) -> None:
        """Look at the weights now and then, and read the result; every rank at the same steps.

        `exchanges` is their number so far. Raise HpcDdpError for NaN or infinity.
        """
        if self._look_answers_at is not None and exchanges >= self._look_answers_at:
            self._look_answers_at = None
            self._refuse_non_finite()
        if exchanges >= self._look_at:
            self._look_at, self._look_answers_at = exchanges + LOOK_EVERY, exchanges + 1
            self._precision.look()
