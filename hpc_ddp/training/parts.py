"""What a `Run` is made of, put together in the order in which a worker comes to life."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hpc_ddp.run import process
from hpc_ddp.run.events import WorkerStarted
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Journal
from hpc_ddp.training import control as groups
from hpc_ddp.training import place, randomness
from hpc_ddp.training.checkpoint import Checkpoints
from hpc_ddp.training.control import Control
from hpc_ddp.training.facts import DistInfo, Surroundings
from hpc_ddp.training.failure import FailureHook
from hpc_ddp.training.grid import Grid
from hpc_ddp.training.keeper import Keeper
from hpc_ddp.training.metrics import Metrics
from hpc_ddp.training.notice import Notices
from hpc_ddp.training.options import Options
from hpc_ddp.training.order import Position
from hpc_ddp.training.pace import Pace
from hpc_ddp.training.precision import Precision, make_deterministic
from hpc_ddp.training.profiling import Profiler, use_per_sample
from hpc_ddp.training.schedule import Schedule, between_failures, slowest_save
from hpc_ddp.training.shown import Board, Progress
from hpc_ddp.training.step_timing import StepTimer
from hpc_ddp.training.storage import Keep
from hpc_ddp.training.streams import make_patient
from hpc_ddp.training.watchdog import Watchdog, flight_recorder


@dataclass(frozen=True)
class Parts:
    """The parts of one worker; `position` is shared by those that need it."""

    info: DistInfo
    grid: Grid
    devices: list[torch.device]
    folder: RunFolder
    position: Position
    control: Control
    notices: Notices
    pace: Pace
    schedule: Schedule
    checkpoints: Checkpoints
    keeper: Keeper
    journal: Journal
    metrics: Metrics
    timer: StepTimer
    watchdog: Watchdog
    precision: Precision
    profiler: Profiler
    board: Board | None  # on rank 0, where it is asked for
    progress: Progress | None


def assemble(asked: dict[str, Any]) -> Parts:
    """Do what `start` promises. Signals first: the rest takes seconds, and may wait for peers.

    `asked` becomes the `Options`, once there is a hook to show what is wrong with them.
    """
    called = time.time()
    FailureHook(DistInfo(), "").install()  # for what the environment says wrong
    info, said = DistInfo.from_env(), Surroundings.from_env()
    if said.notice is not None:
        make_patient()
    notices = Notices(said.notice)
    notices.install()
    hook = FailureHook(info, said.node)
    hook.install()
    options = Options.chosen(said, **asked)
    if options.deterministic:
        make_deterministic()
    grid = Grid(info.rank, info.world_size, options.tp, options.pp)
    devices = groups.choose_devices(info, options.devices_per_worker)
    device = devices[0]
    control = groups.join(info, devices, options.hang_after, options.backend)
    hook.install()
    folder, attempt = place.find(said, info, control)
    hook.journal = journal = folder.journal(f"rank-{info.rank}", attempt)
    if info.rank == 0:
        journal.write(WorkerStarted(process.began_at(), called))
        notices.watch_for_cancel(folder.cancelled)
        # One clock: hosts' clocks differ, and rank 0 alone knows how long a whole save takes.
        notices.watch_end_time(said.end_time, folder.attempt(attempt).end_time)
    hook.position = position = Position()
    keep = Keep(options.keep_last, options.keep_every)
    checkpoints = Checkpoints(folder, attempt, control, control.another(), journal, keep)
    keeper = Keeper(checkpoints, position, devices, options.seed, grid, options.stop_on_nan)
    history = folder.events() if info.rank == 0 and attempt else []
    schedule = Schedule(
        checkpoints,
        info.rank,
        options.save_every,
        options.save_every_steps,
        slowest_save_s=slowest_save(history),
        failure_interval_s=between_failures(history),
    )
    nodes = control.to_first(said.node)
    randomness.seed_all(options.seed, devices)
    watchdog = Watchdog(
        options.hang_after,
        folder.attempt(attempt).node(said.node),
        info.rank,
        position,
        partial(flight_recorder, device),
        hook.tell,
    )
    first = info.rank == 0
    use = use_per_sample(options, device, info.world_size)
    metrics = Metrics(journal, info.world_size, sorted(set(nodes)), use)
    timer = StepTimer(control, journal, position, device, nodes)
    board = Board(folder.path / "tensorboard", position) if options.tensorboard and first else None
    progress = Progress() if options.progress and first else None
    metrics.listeners += [each.show for each in (board, progress) if each is not None]
    trace = folder.path / "profile" / f"attempt-{attempt}-rank-{info.rank}.json.gz"
    return Parts(
        info=info,
        grid=grid,
        devices=devices,
        folder=folder,
        position=position,
        control=control,
        notices=notices,
        pace=Pace(control, notices, schedule, timer),
        schedule=schedule,
        checkpoints=checkpoints,
        keeper=keeper,
        journal=journal,
        metrics=metrics,
        timer=timer,
        watchdog=watchdog,
        precision=Precision(options.precision, device, options.stop_on_nan, grid),
        profiler=Profiler(options.profile, trace, told=first),
        board=board,
        progress=progress,
    )
