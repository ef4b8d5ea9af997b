"""A worker: joined with its peers, and made of the parts of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.journal.events import JournalEvent, Stopped
from hpc_ddp.training.checkpoint.manager import CheckpointManager
from hpc_ddp.training.checkpoint.restore import non_finite_error
from hpc_ddp.training.checkpoint.save import Checkpoints
from hpc_ddp.training.checkpoint.storage.retention import Retention
from hpc_ddp.training.data.batches import move_to_host
from hpc_ddp.training.devices import choose_devices
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.precision import Precision, make_deterministic
from hpc_ddp.training.options import Options
from hpc_ddp.training.process import process_group
from hpc_ddp.training.process.control_tree import open_control
from hpc_ddp.training.process.environment import mark_trained, take_run
from hpc_ddp.training.process.exit_watch import watch_exit
from hpc_ddp.training.process.hang_watchdog import beat
from hpc_ddp.training.process.member import Member
from hpc_ddp.training.stops.signals import NONE, REASONS
from hpc_ddp.training.telemetry.metrics import make_step_listener
from hpc_ddp.training.telemetry.peak_flops import peak_share_per_sample
from hpc_ddp.training.telemetry.profiling import Profiler
from hpc_ddp.training.telemetry.sinks import ProgressLines, TensorBoardSink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


LOOK_EVERY = 10  # exchanges: about two seconds, and with slow steps every tenth step


class Worker(Member):
    """Builds the parts of a run in the order in which a worker comes to life, and ends them.

    `devices` are this rank's, `device` is the first of them, `folder` the run's, and `position`
    where the training is.
    """

    def __init__(self, options: Options) -> None:
        """Install the handlers of exceptions and signals, join the peers, open the run's folder,
        seed all random generators, and make all parts of the run. With `options.deterministic` have
        torch be deterministic. `options` are the script's, not yet checked. It is a collective;
        raises as `process.start.start`."""
        super().__init__(options)
        options = self._options
        self._join(options)
        self._prepare(options)
        self._is_over = False  # `_end` has been called
        # Numbers of exchanges: of the next look at the weights, and of the reading of the result of
        # the look under way.
        self._next_look = 0
        self._result_due: int | None = None

    def _join(self, options: Options) -> None:
        """Note that this process trains in the worker's run, have torch be deterministic if
        `options` say so, choose the devices, join the process group, and open the run's folder. It
        is a collective. Raise UsageError, HpcDdpError and RuntimeError as `start`."""
        take_run(self._env)  # first: it refuses a second group of this process, which may hang
        info = self._info
        self.seed = options.seed
        if options.deterministic:
            make_deterministic(info.rank)
        spread = options.tp, options.pp, options.replicas
        self._dims = ParallelDims(info.rank, info.world_size, *spread)
        self.devices = choose_devices(info, options.devices_per_worker)
        self.device = self.devices[0]
        self._open_run(process_group.join(info, self.devices, options.hang_after, options.backend))

    def _prepare(self, options: Options) -> None:
        """Seed the random generators, and make the parts of the run that save, stop, measure and
        watch. It is a collective. Raise UsageError for a precision that the run can't have,
        RuntimeError if a peer is gone."""
        rng.seed_all(options.seed, self.devices)
        self._prepare_saves(options)
        nodes = self._prepare_decisions(self._checkpoints, self.device)
        self._precision = Precision(options.precision, self.device, options.stop_on_nan, self._dims)
        self._prepare_telemetry(options, nodes)

    def _prepare_saves(self, options: Options) -> None:
        """Make the parts that save, `_checkpoints` and `_manager`, with a process group for the
        thread that saves. It is a collective: raise RuntimeError if a peer is gone."""
        self._checkpoints = Checkpoints(
            self.folder,
            self._journal.attempt,
            self._control,
            open_control(self._info, self._control.timeout),
            self._journal,
            Retention(options.keep_last, options.keep_every),
        )
        self._checkpoints.node = self._env.node
        self._manager = CheckpointManager(
            self._checkpoints,
            self.position,
            self.devices,
            options.seed,
            self._dims,
            options.stop_on_nan,
        )
        # Ranks of one node read the same files from its cache.
        self._manager.shares_reads = self._info.local_world_size < self._info.world_size

    def _prepare_telemetry(self, options: Options, nodes: Sequence[str]) -> None:
        """Make the parts that measure: metrics, profiler, on rank 0 TensorBoard and progress lines.
        `nodes` are the names of the ranks' nodes, on rank 0. Rank 0 prints a message if
        `flops_per_sample` is set and the GPU's peak is not known."""
        is_first, path = self.rank == 0, self.folder.path
        self._board = self._progress = None
        if options.tensorboard and is_first:
            self._board = TensorBoardSink(path / "tensorboard", self.position)
        if options.progress and is_first:
            self._progress = ProgressLines()
        self._make_metrics(
            nodes,
            peak_share_per_sample(
                options, self.device, self.world_size * len(self.devices), self._say
            ),
            [sink.show for sink in (self._board, self._progress) if sink is not None],
        )
        trace = f"attempt-{self._journal.attempt}-rank-{self.rank}.json.gz"
        self._profiler = Profiler(options.profile, path / "profile" / trace, announces=is_first)

    def _refuse_non_finite(self) -> None:
        """Wait for the result of the last `Precision.start_check`, unless it has been read. Raise
        HpcDdpError if there is NaN or infinity in the weights, or fp16's scaler does nothing but
        skip steps; OSError if then the checkpoints can't be listed for the message."""
        if fault := self._precision.take_fault():
            raise non_finite_error(self.folder, self.position.step, fault)

    def _stop(self, reason: int) -> NoReturn:
        """End the run with the event of a stop (`_end`), and raise SystemExit with 0; the process's
        exit then skips torch's teardown. `reason` is a key of `REASONS`. Raises as `_end`."""
        source = self._notices.source
        self._end(Stopped(self.position.step, REASONS[reason], source or None))
        process_group.skip_teardown_at_exit()
        raise SystemExit(0)

    def _end(self, event: JournalEvent) -> None:
        """Save, journal `event`, end the other parts of the run, and leave the process group; rank
        0 prints the goodput. Every rank must call it. A second call does nothing.

        Unless the event is a stop, wait until old checkpoints are removed and all ranks have called
        this; if a rank is gone, and this rank has a notice, `event` is not journalled.

        Raise HpcDdpError if a weight is not finite or the save fails, SupersededError if a later
        attempt has begun, RuntimeError if a peer is gone; on rank 0 also as `_end_journal`. Raise
        UsageError, before all else, as `_refuse_unloaded`.
        """
        if self._is_over:
            return
        self._refuse_unloaded()
        is_stop = isinstance(event, Stopped)
        self._precision.start_check()
        self._refuse_non_finite()
        self._manager.save_surely(anew=not is_stop)
        if not is_stop:  # a stop has no time for it, and the next start does it
            self._checkpoints.tidy()
        self._watchdog.end()
        # A rank that is still at work may be ended by a notice, and the next attempt repeats it.
        have_met = is_stop or process_group.meet(self._control)
        self._end_journal(event if have_met or self._notices.reason == NONE else None)
        for end in [sink.end for sink in (self._board, self._progress, self._profiler) if sink]:
            end()
        self._is_over = True
        mark_trained(self._env)
        self._notices.end(then_exit=is_stop)
        process_group.leave(self._control, self.device, then_exit=is_stop)
        watch_exit(is_stop)
        if self.rank == 0:
            if is_stop:
                self._say_stop()
            self._say_goodput()

    def _refuse_unloaded(self) -> None:
        """Raise UsageError where `track` has raised an error: a save would put the objects as they
        are, with nothing loaded, in the place of the run's checkpoints."""
        if self._manager.objects and not self._has_tracked:
            raise UsageError(
                "the run ends although run.track has raised an error, and what the run has is not"
                " loaded",
                hint="let the error of run.track end the script",
            )

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        """Return the sum of each of the `values` over all ranks, in double precision. All ranks
        call it, with as many values.

        Ranks that take the same samples count once; with pipelines one rank of the last stage
        counts. A tensor has one number: for other values `float` raises RuntimeError, ValueError or
        TypeError, and the other ranks wait in vain. Raise RuntimeError if a peer is gone.
        """
        counts = self._dims.counts
        numbers_here = [float(value) if counts else 0.0 for value in values]
        sums = torch.tensor(numbers_here, dtype=torch.float64, device="cpu")
        self._control.sum(sums)
        beat()
        numbers: list[float] = sums.tolist()
        return numbers

    @property
    def _has_tracked(self) -> bool:
        """Whether `track` was called, and has raised no error."""
        return self._manager.has_tracked

    @property
    def resumed(self) -> bool:
        """Whether `track` has taken up a checkpoint: False in the first start of a run. Raises
        UsageError before `track`."""
        if not self._has_tracked:
            raise UsageError(
                "run.resumed was read before run.track, which takes up the checkpoint",
                hint="weights that are loaded before run.track need no question: a checkpoint"
                " replaces them",
            )
        return self._manager.resumed

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on each rank: ``max(run.gather(x))``. The values
        must be small, and ones that can be pickled; tensors arrive on the CPU and without a graph.
        All ranks call it; raise RuntimeError if a peer is gone."""
        values: list[Any] = self._control.from_first(self._control.to_first(move_to_host(value)))
        beat()
        return values

    def barrier(self) -> None:
        """Wait until all ranks have called it; raise RuntimeError if a peer is gone."""
        self._control.barrier()
        beat()

    @contextmanager
    def rank_0_first(self) -> Iterator[None]:
        """Run the block on rank 0, then on the others: for a download, or a cache on a shared disk.
        All ranks enter. After an error on rank 0 the launcher ends the others, too. Raise
        RuntimeError if a peer is gone."""
        with process_group.run_first_alone(self._control, beat):
            yield
        beat()

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Count the time of the block as a pause, and not as time of a step: for an upload, or a
        plot. No rank waits for another one. A block longer than `hang_after` counts as a hang."""
        yield
        beat()
        self._timer.start_step()
        self._consensus.end_pause()

    def on_metrics(self, hook: Callable[[int, dict[str, float]], object]) -> None:
        """Have ``hook(step, metrics)`` called on rank 0 for each line of metrics in the journal: at
        first two a second, later one in ten seconds. `metrics` has the values of `step` as numbers,
        ``epoch``, ``samples_per_s`` and, where it is known, ``mfu``.

        Steps that an earlier attempt has journalled, and that are done again since the last
        checkpoint, are passed over: a tracker gets each step once. An error of the hook ends the
        run.
        """
        if self.rank == 0:
            self._metrics.listen(make_step_listener(hook, self._read_history()))

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
        """Begin a look at the weights with every `LOOK_EVERY`-th exchange of the ranks, and read
        its result at the exchange after it. Every rank calls it at each step.

        `exchanges` is the number of exchanges so far. Raises as `_refuse_non_finite`.
        """
        if self._result_due is not None and exchanges >= self._result_due:
            self._result_due = None
            self._refuse_non_finite()
        if exchanges >= self._next_look:
            self._next_look, self._result_due = exchanges + LOOK_EVERY, exchanges + 1
            self._precision.start_check()
