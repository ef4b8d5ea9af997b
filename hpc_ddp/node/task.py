"""The Slurm task of each worker, where srun starts the workers and not torchrun.

``python <run>/lib/node.py task <python> <script> <its arguments>`` (``--launcher srun``)

A supervisor like a node's, of one worker: the same notices, logs, records and bounds. The variables
that torchrun would set for the worker are made of those that Slurm sets for the task.
"""

from __future__ import annotations

import os
import signal
import sys

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.file_io import read_json
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.supervisor import Launch, expand, supervise, torchrun_launch
from hpc_ddp.node.worker import started_by


def worker_launch(place: Place, command: list[str]) -> Launch:
    """Return the launch of this task's worker; `command` is python and the script with its
    arguments.

    Ranks are in blocks, as --distribution has it. Raise KeyError outside of a Slurm task.
    """
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    per_node = size // len(place.nodes)
    node_of = [] if rank else [place.nodes[peer // per_node] for peer in range(size)]
    return Launch(
        name=f"{place.node}-{rank}",
        folder=place.attempt.node(place.node, rank),
        command=started_by(command[0], command[1:]),
        env=_variables(place, rank, size),
        peers=[place.attempt.node(node, peer).record for peer, node in enumerate(node_of)],
        rank=rank,
        store_port=0 if rank else AttemptEnv.from_env(os.environ).port,
        reports_fabric=rank % per_node == 0,
    )


def _variables(place: Place, rank: int, size: int) -> dict[str, str]:
    """Return the variables that torchrun would set for worker `rank` of `size`.

    By TORCHELASTIC_RUN_ID libraries know that starts and restarts are not theirs: Lightning then
    keeps its own requeue off, which revives cancelled jobs.
    """
    env = AttemptEnv.from_env(os.environ)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size // len(place.nodes)),
        "GROUP_RANK": str(place.index),
        "GROUP_WORLD_SIZE": str(len(place.nodes)),
        "MASTER_ADDR": env.head,
        "MASTER_PORT": str(env.port),
        "TORCHELASTIC_RUN_ID": env.rdzv_id,
        "HPC_DDP_AGENT_PID": str(os.getpid()),
    }


def main(command: list[str]) -> int:
    """Supervise this task's worker; `command` is python and the script with its arguments."""
    return supervise(worker_launch, command)


def submitit_main(part: str, command: list[str]) -> None:
    """Be submitit's task: the supervisor of a node, or of a worker where `part` is ``task``.

    Exits the process with the supervisor's code: submitit's own is 0 whatever a function returned.
    One file with `command` serves all tasks of an array; the script's arguments are in the run's
    job.json. Raise KeyError if that can't be read.
    """
    signal.signal(signal.SIGCONT, signal.SIG_DFL)  # submitit logs each
    args = read_json(AttemptEnv.from_env(os.environ).run_folder.job_json)["args"]
    if part == "task":
        sys.exit(main([*command, *args]))
    sys.exit(supervise(torchrun_launch, [*expand(command, os.environ), *args]))
