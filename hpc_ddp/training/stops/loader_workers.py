"""All forked loader workers of torch outlive a notice, whoever made their DataLoader.

A cluster may send its signal to every process of a step. A worker that dies of it takes its rank
along, before that has saved: torch raises "DataLoader worker … is killed by signal: Terminated".
Workers that are not forked have threads by then, which no mask reaches any more.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from torch.utils.data._utils import worker

from hpc_ddp.training.stops.signals import ignore_in_loader

_LOOP = worker._worker_loop


def outlive_notices() -> None:
    """Have the loader workers that this process starts from now on outlive a notice."""
    # Not by worker_init_fn: libraries have one of their own where there is none.
    vars(worker)["_worker_loop"] = _loop


def _loop(*args: Any) -> None:
    """Run torch's loop of a loader worker, deaf to notices."""
    if multiprocessing.parent_process() is not None:  # else it is a thread of the rank
        ignore_in_loader()
    _LOOP(*args)
