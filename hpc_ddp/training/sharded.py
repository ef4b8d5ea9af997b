"""What there is to know of a DTensor: FSDP2's and tensor parallel's way to shard a tensor.

Importing it takes a second, so that is done only where a script has loaded it already.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.training.grid import Grid


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a DTensor; where nobody has imported that, there are none."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def reshard(model: torch.nn.Module) -> None:
    """Let FSDP2 have its shards for parameters again.

    After a forward without a backward, an evaluation's, the outermost module has the gathered
    ones, which no optimizer knows.
    """
    module: Any = sys.modules.get("torch.distributed.fsdp")
    for each in model.modules() if module is not None else ():
        if isinstance(each, module.FSDPModule):
            each.reshard()


def local_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return start and size of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(start), tuple(size)


def holds_first_copy(tensor: Any, grid: Grid) -> bool:
    """Tell whether this rank is the first of those that hold the same part of a DTensor.

    Where its mesh is one dimension of the run's, the ranks along the other one hold the same.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise HpcDdpError("a tensor with a pending reduction (Partial) can't be saved")
    coordinate = tensor.device_mesh.get_coordinate()
    names: Any = tensor.device_mesh.mesh_dim_names
    beside = {("dp",): grid.tp_rank, ("tp",): grid.dp_rank}.get(names, 0)
    return (
        coordinate is not None
        and beside == 0
        and all(
            place == 0
            for place, placement in zip(coordinate, tensor.placements, strict=True)
            if placement.is_replicate()
        )
    )


def reduced(tensor: Any) -> torch.Tensor:
    """Return a gradient with its reduction done where that is pending (Partial)."""
    if not is_sharded(tensor) or not any(each.is_partial() for each in tensor.placements):
        plain: torch.Tensor = tensor
        return plain
    from torch.distributed.tensor import Replicate

    full = [Replicate() if each.is_partial() else each for each in tensor.placements]
    done: torch.Tensor = tensor.redistribute(placements=full)
    return done


def keep_apart(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step one tensor at a time where a group has DTensors and plain ones.

    On accelerators torch's optimizers take all tensors of a group in one call (foreach), which is
    refused for a mixture, as tensor parallelism leaves it: its plan names the layers that are cut.
    """
    for group in optimizer.param_groups:
        kinds = {is_sharded(parameter) for parameter in group["params"]}
        if len(kinds) == 2 and group.get("foreach") is None and not group.get("fused"):
            group["foreach"] = False


def from_local(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a DTensor with this rank's part, sharded as another one is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(like.to_local().device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
