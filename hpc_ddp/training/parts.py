"""What a `Run` is made of, put together in the order in which a worker comes to life."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


def assemble(
    seed: int, save_every: float | str | None, save_every_steps: int | None, keep: Keep
) -> Parts:
    """Do what `start` promises. Signals first: the rest takes seconds, and may wait for peers."""
    info, said = DistInfo.from_env(), Surroundings.from_env()
    notices = Notices(said.notice)
    notices.install()
    hook = FailureHook(info, said.node)
    hook.install()
    device = groups.choose_device(info)
    control = groups.join(info, device)
    hook.install()
    folder, attempt = place.find(said, info, control)
    hook.journal = journal = folder.journal(f"rank-{info.rank}", attempt)
    if info.rank == 0:
        notices.stop_file = folder.cancelled
    every = save_every if said.save_every is None else said.save_every
    hook.position = position = Position()
    background = Control(info)
    checkpoints = Checkpoints(folder, attempt, control, background, journal, keep)
    keeper = Keeper(checkpoints, position, device, seed, info.rank, info.world_size)
    history = folder.events() if info.rank == 0 and attempt else []
    schedule = Schedule(keeper, info.rank, every, save_every_steps, history)
    hosts = sorted(set(control.to_first(said.node)))
    randomness.seed_all(seed, device)
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
    )
