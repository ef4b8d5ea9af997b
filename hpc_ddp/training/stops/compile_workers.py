"""The processes in which torch's compiler makes Triton's kernels outlive a notice.

A cluster may send its signal to every process of a step. These processes die of it: a compilation
under way raises "SubprocPool closed", or never ends in torch 2.9, where the rank should stop and
save.
"""

from __future__ import annotations

import atexit
import importlib
import signal
from collections.abc import Iterable
from typing import Any

import torch

from hpc_ddp.training.stops.signals import SIGNALS


def start_compile_workers(objects: Iterable[Any]) -> None:
    """If a model among `objects` is to be compiled for an accelerator, start the processes that
    compile kernels for this process, with the signals of notices blocked. Otherwise, and with a
    torch that has no such processes, do nothing.

    Processes that run already stay as they are. An exit function is registered, by which they end
    without a wait.
    """
    if not any(isinstance(model, torch.nn.Module) and _is_compiled(model) for model in objects):
        return
    try:
        compiler: Any = importlib.import_module("torch._inductor.async_compile").AsyncCompile
        # Programs inherit a mask, but not handlers. A notice to this process waits until the mask
        # is put back.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            compiler.warm_pool()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if compiler.process_pool.cache_info().currsize:  # the pool is made
            atexit.register(_close_pool, compiler.process_pool())
    except (ImportError, AttributeError):  # these names are private to torch, and may be gone
        return


def _is_compiled(model: torch.nn.Module) -> bool:
    """Return whether a model, or a part of it, was compiled in place or wrapped by torch.compile;
    False for a model on the CPU."""
    if not any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return False
    return any(
        getattr(module, "_compiled_call_impl", None) or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


def _close_pool(pool: Any) -> None:
    """Have the processes of torch's `pool` end by themselves: else torch sends them SIGTERM, which
    they block, and waits for ten seconds."""
    if getattr(pool, "running", False) and hasattr(pool, "write_pipe"):
        pool.running = False
        pool.write_pipe.close()  # their parent process ends at the end of its input, and ends them
