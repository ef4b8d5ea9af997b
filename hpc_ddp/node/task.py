"""The Slurm task of each worker, where srun starts them and not torchrun (``--launcher srun``).

``python <run>/lib/node.py task <python> <script> <its arguments>``

A supervisor like a node's, of one worker: the same notices, logs, records and bounds. What
torchrun would tell the worker stands in its environment, made of what Slurm tells the task.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.run_folder import NodeFolder
from hpc_ddp.node.supervisor import Supervisor, expand, supervise
from hpc_ddp.node.worker import started_by


@dataclass
class TaskSupervisor(Supervisor):
    """One worker's part of one attempt."""

    def __post_init__(self) -> None:
        self.rank, self.size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        self.workers = self.size // len(self.place.nodes)  # per node
        super().__post_init__()
        log = self.folder.rank_log(0)
        self._log_position = log.stat().st_size if log.exists() else 0  # of a try at another port

    def _own_folder(self) -> NodeFolder:
        return self.place.attempt.node(self.place.node, self.rank)

    def _name(self) -> str:
        return f"{self.place.node}-{self.rank}"

    @property
    def _speaks_for_its_node(self) -> bool:
        return self.rank % self.workers == 0

    def _pids(self) -> list[Path]:
        return [self.folder.path / f"rank-{self.rank}.pid"]

    def _peers(self) -> list[Path]:
        place = self.place
        ranks = range(self.size)  # in blocks, as the step's --distribution has it
        return [place.attempt.node(place.nodes[r // self.workers], r).record for r in ranks]

    def _command(self) -> list[str]:
        return started_by(self.command[0], self.command[1:])

    def _env(self) -> dict[str, str]:
        """Set what torchrun sets.

        TORCHELASTIC_RUN_ID is how libraries tell that somebody else looks after starts and
        restarts: Lightning then keeps its own requeue off, which revives cancelled jobs.
        """
        env = AttemptEnv.from_env(os.environ)
        return super()._env() | {
            "RANK": str(self.rank),
            "LOCAL_RANK": os.environ["SLURM_LOCALID"],
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "GROUP_RANK": str(self.place.index),
            "GROUP_WORLD_SIZE": str(len(self.place.nodes)),
            "MASTER_ADDR": env.head,
            "MASTER_PORT": str(env.port),
            "TORCHELASTIC_RUN_ID": env.rdzv_id,
            "HPC_DDP_AGENT_PID": str(os.getpid()),
        }

    def _show_rank_0(self) -> None:
        if self.rank == 0:
            super()._show_rank_0()

    def _failed_workers(self, code: int, noted: dict[str, Any]) -> list[dict[str, Any]]:
        # Without a process there was an error, and no worker.
        return [] if noted else [{"rank": self.rank, "code": code, "time": time.time()}]

    def _failures(self, code: int) -> list[dict[str, Any]]:
        """Also note where the first rank's store found its port taken."""
        failures = super()._failures(code)
        error = failures[0]["error"]
        if (
            self.rank == 0
            and "EADDRINUSE" in error
            and str(AttemptEnv.from_env(os.environ).port) in error
        ):
            self.place.attempt.port_taken.touch()
        return failures


def main(command: list[str]) -> int:
    return supervise(TaskSupervisor, command)


def submitit_main(part: str, command: list[str]) -> None:
    """The same, or a node's supervisor, as submitit's task, which would end with code 0 whatever
    a function returned.

    One file with `command` serves all tasks of an array; the script's arguments are the run's own.
    """
    signal.signal(signal.SIGCONT, signal.SIG_DFL)  # submitit logs each
    args = read_json(AttemptEnv.from_env(os.environ).run_folder.job_json)["args"]
    if part == "task":
        sys.exit(main([*command, *args]))
    sys.exit(supervise(Supervisor, [*expand(command, os.environ), *args]))
