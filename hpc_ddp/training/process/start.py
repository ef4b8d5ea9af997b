"""`start`: the first call of a training script."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.process import keep_folder_out
from hpc_ddp.training.options import Options
from hpc_ddp.training.run import Run

P = ParamSpec("P")


def _take_options_as_parameters(
    make_options: Callable[P, Options],
) -> Callable[[Callable[[Options], Run]], Callable[P, Run]]:
    """Return a decorator. It turns a function of one `Options` into one with the parameters of
    `make_options`, whose result is the function's argument."""

    def decorate(function: Callable[[Options], Run]) -> Callable[P, Run]:
        """Return `function` with the parameters of `make_options`, and their signature for help."""

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Run:
            return function(make_options(*args, **kwargs))

        # `help` shows this one; by `wraps` it would show the signature of `function`.
        vars(call)["__signature__"] = signature(make_options).replace(return_annotation=Run)
        return call

    return decorate


@_take_options_as_parameters(Options)
def start(options: Options) -> Run:
    """Join the process group, listen for notices, and open the run's folder.

    Call it first, on every rank: until then a SIGTERM just ends the process. Seeds all generators
    with `seed`, the same on all ranks, so that they build the same model and data; `Run.track`
    then gives each rank its own. It takes over SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2, and
    ``sys.excepthook``: an exception ends the process without a teardown. Under ``hpc-ddp drill``
    the run is recorded and disturbed, too. `Options` documents the parameters::

        run = start(seed=1, precision="bf16", save_every=600)

    Raises
    ------
    UsageError
        a variable of the environment, or a parameter, makes no sense; or multiprocessing runs the
        script again, in a process that it starts; or there is a process group already; or the run's
        folder is another script's
    HpcDdpError
        more workers than GPUs on this node, the backend can't be used, the run's folder can't be
        made, or another process works in it
    RuntimeError
        the other ranks do not come (torch's own)
    ValueError
        it is called outside of the main thread (Python's own)
    """
    _refuse_in_child()
    keep_folder_out()
    if plan := os.environ.get("HPC_DDP_DRILL"):
        from hpc_ddp.training.drill import DrilledRun

        return DrilledRun(options, json.loads(plan))
    return Run(options)


def _refuse_in_child() -> None:
    """Raise UsageError while multiprocessing imports the script in a new process (spawn, server).

    A second rank of the same number would wait for its group for ever.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(  # a hint of its own would not be printed there
            "start() was called by a process that multiprocessing has started, which runs the"
            ' script again; accepted: a script whose body stands below  if __name__ == "__main__":'
        )
