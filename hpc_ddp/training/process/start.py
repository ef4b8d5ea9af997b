"""`start`: the first call of a training script."""

from __future__ import annotations

import json
import multiprocessing
import os
from typing import Literal

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.run import Run


def start(
    seed: int = 0,
    *,
    save_every: float | Literal["auto"] | None = 300.0,
    save_every_steps: int | None = None,
    keep_last: int = 3,
    keep_every: int | None = None,
    hang_after: float | None = 1800.0,
    precision: str = "fp32",
    backend: Literal["nccl", "gloo", "mpi"] | None = None,
    stop_on_nan: bool = True,
    deterministic: bool = False,
    tensorboard: bool = False,
    progress: bool = True,
    profile: tuple[int, int] | None = None,
    flops_per_sample: float | None = None,
    peak_flops: float | None = None,
    tp: int = 1,
    pp: int = 1,
    devices_per_worker: int = 1,
) -> Run:
    """Join the process group, listen for notices, and open the run's folder.

    Call it first, on every rank: until then a SIGTERM just ends the process. Seeds all
    generators with `seed`, the same on all ranks, so that they build the same model and data;
    `Run.epochs` then gives each rank its own.

    Parameters
    ----------
    seed
        decides initial weights, order of the data, and every other random number
    save_every
        seconds between checkpoints, ``"auto"`` for the interval that is expected to lose the
        least time, None for no such clock; ``HPC_DDP_SAVE_EVERY`` overrides
    save_every_steps
        a checkpoint after every so many optimizer steps as well
    keep_last
        how many of the newest checkpoints stay, at least 2; the best one does (see `Run.best`)
    keep_every
        of every so many steps one checkpoint stays for good
    hang_after
        seconds without a sign of progress, from the first step on, after which a rank writes
        its threads' stacks into the run's folder and fails, so that the run can be retried;
        None: never; ``HPC_DDP_HANG_AFTER`` overrides (0: never). ProgressLines is a step, a batch
        of the run's `loader` or of a `shard`, a `sum`, a save, an epoch's end: code between
        steps that takes longer than this calls ``run.sum()`` now and then, on all ranks
    precision
        "fp32", "bf16" or "fp16": what `Run.autocast` computes in; "fp16" scales the loss, and so
        needs `Run.update` in place of ``optimizer.step()``
    backend
        what carries gradients between ranks; None: NCCL on GPUs and Gloo on CPUs. Gloo works on
        GPUs too, slowly, to tell whether NCCL is to blame; MPI needs a torch that was built with
        it, and its own launcher; ``HPC_DDP_BACKEND`` overrides
    stop_on_nan
        ends the run with an error once a weight is NaN or infinite; such weights are never saved.
        Each save's copy is looked through behind the training, and the weights about once a
        second (every tenth step where steps take long): 0.13 ms of a 1 ms step, 15 ms of a 530 ms
        one, measured on a CPU
    deterministic
        has torch use deterministic algorithms only, which is slower
    tensorboard
        writes what goes to `Run.step` into ``<run folder>/tensorboard`` as well
    progress
        prints a line with step, values, speed and time left on stderr now and then
    profile
        the first step of this attempt to trace, from 2, and the last; ``HPC_DDP_PROFILE=10:15``
        overrides
    flops_per_sample
        of forward and backward; gives ``mfu``, the share of the GPUs' peak that is used
    peak_flops
        of one GPU per second, where `hpc_ddp.training.telemetry.profiling` does not know it
    tp
        ranks that share each layer (tensor parallel); neighbours, so on one node where they fit
    pp
        stages of a pipeline. The other ``world size / (tp * pp)`` ranks are data parallel: only
        these take different samples
    devices_per_worker
        GPUs of each worker, `Run.devices`, for a model that the script itself spreads over them

    Raises
    ------
    UsageError
        a variable of the environment, or a parameter, makes no sense; or multiprocessing runs the
        script again, in a process that it starts
    HpcDdpError
        more workers than GPUs on this node, the backend can't be used, or another process works
        in the run's folder
    """
    arguments = dict(locals())
    _refuse_in_child()
    if plan := os.environ.get("HPC_DDP_DRILL"):
        from hpc_ddp.training.drill import DrilledRun

        return DrilledRun(arguments, json.loads(plan))
    return Run(arguments)


def _refuse_in_child() -> None:
    """Raise UsageError while multiprocessing imports the script in a new process (spawn, server).

    A second rank of the same number would wait for its group for ever.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(  # a hint of its own would not be printed there
            "start() was called by a process that multiprocessing has started, which runs the"
            ' script again; accepted: a script whose body stands below  if __name__ == "__main__":'
        )
