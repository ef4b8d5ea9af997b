"""All forked loader workers of torch and torchdata outlive a notice, whoever made their DataLoader.

A cluster may send its signal to every process of a step. A worker that dies of it takes its rank
along, before the rank has saved: torch raises "DataLoader worker … is killed by signal:
Terminated". Workers by spawn have threads before they get here, in which a SIGTERM is not blocked.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hpc_ddp.training.stops.compile_workers import start_compile_workers
from hpc_ddp.training.stops.signals import ignore_notices

# The modules in which the loaders look up `_worker_loop`.
_MODULES = (
    "torch.utils.data._utils.worker",
    "torchdata.stateful_dataloader.stateful_dataloader",
)
_LOOPS: dict[str, Callable[..., None]] = {}  # each module's own `_worker_loop`


def outlive_notices(objects: Iterable[Any] = ()) -> None:
    """Have the loader workers that this process starts from now on outlive a notice: replace
    `_worker_loop` in each of the loaders' modules that is imported by now. Also call
    `start_compile_workers` for the models among `objects`. A second call replaces nothing twice."""
    start_compile_workers(objects)
    # Not by worker_init_fn: libraries set their own on a DataLoader that has none.
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None and not isinstance(module._worker_loop, _DeafLoop):
            _LOOPS[name] = module._worker_loop
            vars(module)["_worker_loop"] = _DeafLoop(name)


class _DeafLoop(NamedTuple):
    """A function in place of the `_worker_loop` of the loaders' module `module`, which ignores
    notices. It can be pickled, for workers by spawn."""

    module: str

    def __call__(self, *args: Any) -> None:
        """Run the module's own loop with `args`; in a process of its own first call
        `ignore_notices`."""
        if multiprocessing.parent_process() is not None:  # else this is a thread of the rank
            ignore_notices()
        # A worker by spawn has imported the module anew, and `_LOOPS` is empty.
        loop = _LOOPS.get(self.module) or importlib.import_module(self.module)._worker_loop
        loop(*args)
