"""What a `Run` is made of, put together in the order in which a worker comes to life."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from hpc_ddp.run import process
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Journal
from hpc_ddp.training import control as groups
from hpc_ddp.training import place, randomness
from hpc_ddp.training.checkpoint import Checkpoints
from hpc_ddp.training.control import Control
from hpc_ddp.training.facts import DistInfo, Surroundings
from hpc_ddp.training.failure import FailureHook
from hpc_ddp.training.keeper import Keeper
from hpc_ddp.training.metrics import Metrics
from hpc_ddp.training.notice import Notices
from hpc_ddp.training.order import Position
from hpc_ddp.training.pace import Pace
from hpc_ddp.training.schedule import Schedule
from hpc_ddp.training.storage import Keep
from hpc_ddp.training.watchdog import Watchdog, flight_recorder


@dataclass(frozen=True)
class Parts:
    """The parts of one worker; `position` is shared by those that need it."""

    info: DistInfo
    device: torch.device
    folder: RunFolder
    position: Position
    control: Control
    notices: Notices
    pace: Pace
    schedule: Schedule
    keeper: Keeper
    journal: Journal
    metrics: Metrics
    watchdog: Watchdog


def assemble(
    seed: int,
    save_every: float | str | None,
    save_every_steps: int | None,
    keep: Keep,
    hang_after_s: float | None,
) -> Parts:
    """Do what `start` promises. Signals first: the rest takes seconds, and may wait for peers."""
    called = time.time()
    info, said = DistInfo.from_env(), Surroundings.from_env()
    notices = Notices(said.notice)
    notices.install()
    hook = FailureHook(info, said.node)
    hook.install()
    device = groups.choose_device(info)
    hang_after_s = hang_after_s if said.hang_after is None else said.hang_after
    control = groups.join(info, device, hang_after_s)
    hook.install()
    folder, attempt = place.find(said, info, control)
    hook.journal = journal = folder.journal(f"rank-{info.rank}", attempt)
    if info.rank == 0:
        journal.write("worker", began=process.began_at(), called=called)
        notices.stop_file = folder.cancelled
    every = save_every if said.save_every is None else said.save_every
    hook.position = position = Position()
    checkpoints = Checkpoints(folder, attempt, control, control.another(), journal, keep)
    keeper = Keeper(checkpoints, position, device, seed, info.rank, info.world_size)
    history = folder.events() if info.rank == 0 and attempt else []
    schedule = Schedule(keeper, info.rank, every, save_every_steps, history)
    hosts = sorted(set(control.to_first(said.node)))
    randomness.seed_all(seed, device)
    watchdog = Watchdog(
        hang_after_s,
        folder.attempt(attempt).node(said.node),
        info.rank,
        position,
        partial(flight_recorder, device.type),
        hook.tell,
    )
    return Parts(
        info=info,
        device=device,
        folder=folder,
        position=position,
        control=control,
        notices=notices,
        pace=Pace(control, notices, said.end_time, schedule),
        schedule=schedule,
        keeper=keeper,
        journal=journal,
        metrics=Metrics(journal, info.world_size, hosts),
        watchdog=watchdog,
    )
