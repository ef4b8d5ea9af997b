"""The processes in which torch's compiler makes Triton's kernels outlive a notice.

A cluster may send its signal to every process of a step. They die of it: a compilation in work
raises "SubprocPool closed", or never ends in torch 2.9, where the rank should stop and save.
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
    compile kernels, deaf to notices.

    They serve all of this process. Compile processes that it has started before stay as they are,
    and so do those for a function that the script compiles without such a model.
    """
    if not any(isinstance(model, torch.nn.Module) and _is_compiled(model) for model in objects):
        return
    try:
        compiler: Any = importlib.import_module("torch._inductor.async_compile").AsyncCompile
        # A mask is inherited by exec, as handlers are not, and no notice to this process is lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            compiler.warm_pool()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if compiler.process_pool.cache_info().currsize:
            atexit.register(_leave, compiler.process_pool())
    except (ImportError, AttributeError):  # all of it is private, and may be gone in another torch
        return


def _is_compiled(model: torch.nn.Module) -> bool:
    """Return whether a model on an accelerator, or a part of it, was compiled in place or wrapped
    by torch.compile."""
    if not any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return False
    return any(
        getattr(module, "_compiled_call_impl", None) or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


def _leave(pool: Any) -> None:
    """Let the workers end by themselves: else torch waits ten seconds for them to obey a
    SIGTERM."""
    if getattr(pool, "running", False) and hasattr(pool, "write_pipe"):
        pool.running = False
        pool.write_pipe.close()  # their parent ends at the end of its input, and ends them
