"""Prints NCCL's settings as they are when torch makes the process group: NCCL reads them once."""

import os
from typing import Any

import torch.distributed as dist

from hpc_ddp.training import start
from hpc_ddp.training.models.precision import SUMS_IN_SWITCHES

init_process_group = dist.init_process_group


def init(*args: Any, **options: Any) -> None:
    print("SETTINGS", *(os.environ.get(name) for name in SUMS_IN_SWITCHES), flush=True)
    init_process_group(*args, **options)


dist.init_process_group = init
start(deterministic=True).finish()
