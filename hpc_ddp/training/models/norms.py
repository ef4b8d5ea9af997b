"""The norm of tensors that lie on several ranks: as shards, as copies, as a stage's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, get_total_norm

from hpc_ddp.training.devices import sum_type
from hpc_ddp.training.models.dtensor import holds_first_copy, is_sharded, reduced
from hpc_ddp.training.models.mesh import Grid


def clip_(
    parameters: Sequence[torch.Tensor], limit: float, grid: Grid, device: torch.device
) -> torch.Tensor:
    """Scale the gradients down to a norm over all ranks; return the one before, a scalar."""
    if not _is_spread(parameters, grid):
        return clip_grad_norm_(parameters, limit)
    grads = [each.grad for each in parameters if each.grad is not None]
    norm = _norm([reduced(grad) for grad in grads], grid, device)
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    # The gradients themselves: `reduced` returns a copy of one whose sum over ranks is pending.
    for grad in map(_local, grads):
        grad.mul_(factor.to(grad.device))
    return norm


def total_norm(tensors: Sequence[torch.Tensor], grid: Grid, device: torch.device) -> torch.Tensor:
    """Return the norm of all tensors of all ranks, each counted once: a scalar, equal on all."""
    return _norm(tensors, grid, device) if _is_spread(tensors, grid) else get_total_norm(tensors)


def _is_spread(tensors: Sequence[torch.Tensor], grid: Grid) -> bool:
    return grid.pp > 1 or any(map(is_sharded, tensors))


def _norm(tensors: Sequence[torch.Tensor], grid: Grid, device: torch.device) -> torch.Tensor:
    """One number travels, whatever the mix: each rank adds up what it has the first copy of."""
    mine = [_local(each) for each in tensors if _is_first(each, grid)]
    ours = [each for each in mine if each.numel()]
    norm = get_total_norm(ours) if ours else torch.zeros((), device=device)
    square = norm.to(device, sum_type(device)) ** 2
    dist.all_reduce(square)
    return square.sqrt().float()


def _is_first(tensor: torch.Tensor, grid: Grid) -> bool:
    return holds_first_copy(tensor, grid) if is_sharded(tensor) else grid.stage_rank == 0


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local.detach()
