"""Supervisors whose torchrun and workers are stand-ins."""

from __future__ import annotations

from typing import Any

from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.node.child_process import torchrun_launch
from hpc_ddp.node.supervisor import Supervisor
from unit.node.fakes import NoSignals, place_of

COMMAND = [
    "python",
    "-u",
    "node.py",
    "elastic_agent",
    "--nnodes=2",
    "--rdzv-conf=a=1",
    "train.py",
    "--lr=1",
]


class Agent:
    """A torchrun that ends with `returncode` at the third look."""

    def __init__(self, returncode: int = 0) -> None:
        self.returncode = returncode
        self.looks = 0
        self.killed = False

    def poll(self) -> int | None:
        self.looks += 1
        return self.returncode if self.looks > 2 or self.killed else None

    def kill(self) -> None:
        self.killed = True


def make_supervisor(attempt: AttemptFolder, *command: str, **values: Any) -> Supervisor:
    signals = NoSignals()
    place = place_of(attempt, **values)
    return Supervisor(place, torchrun_launch(place, list(command or COMMAND)), signals)


def write_pids(watcher: Supervisor, *pids: int) -> None:
    for rank, pid in enumerate(pids):
        (watcher.folder.path / f"rank-{rank}.pid").write_text(f"{pid} then")


def make_agent() -> Any:
    """Return an agent, as something that is no `Popen` and can be taken for one."""
    return Agent()
