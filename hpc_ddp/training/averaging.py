"""The exponential moving average of a model's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpc_ddp.run.errors import UsageError
from hpc_ddp.training.sharded import fsdp_modules, is_sharded


def averaged(model: torch.nn.Module, decay: float) -> AveragedModel:
    """Return a copy whose ``update_parameters`` averages weights and running statistics.

    Buffers that are no floating-point numbers (counters, masks) are copied.
    """
    if not 0 <= decay <= 1:
        raise UsageError(f"decay is {decay}; accepted: a number from 0 to 1, such as 0.999")
    if fsdp_modules(model):
        raise UsageError(
            "run.ema was called after run.fully_shard, and torch copies no model that is sharded;"
            " accepted: a model before that",
            hint="average = run.ema(model), then run.fully_shard for the model and for"
            " average.module",
        )
    average: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # as torch has it

    def step(ours: Any, theirs: Any, count: Any) -> None:
        # Tensor parallelism leaves DTensors and plain ones, which torch takes in no one call.
        for sharded in (False, True):
            both = zip(ours, theirs, strict=True)
            pairs = [pair for pair in both if is_sharded(pair[0]) is sharded]
            if not pairs:
                continue
            own, other = map(list, zip(*pairs, strict=True))
            if own[0].is_floating_point():
                average(own, other, count)
            else:
                torch._foreach_copy_(own, other)

    return AveragedModel(model, multi_avg_fn=step, use_buffers=True)
