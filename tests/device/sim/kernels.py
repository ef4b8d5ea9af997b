"""Kernels that torch has for GPUs only: of SyncBatchNorm, and of recurrent cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library: Any = None  # registrations last as long as it does


def register() -> None:
    global _library
    library: Any = torch.library.Library  # untyped
    _library = library("aten", "IMPL", "PrivateUse1")
    for name, kernel in KERNELS.items():
        _library.impl(name, kernel)


# -- SyncBatchNorm --------------------------------------------------------------------------------


def _over(x: Tensor) -> list[int]:
    """Return the dimensions that statistics are taken over: all but the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape([1, -1] + [1] * (x.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x.float()
    return x.mean(_over(x)), (x.var(_over(x), unbiased=False) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = counts.reshape(-1, 1).to(mean.dtype)
    total = weights.sum()
    mean_of_all = (mean * weights).sum(0) / total
    squares = invstd.pow(-2) - eps + (mean - mean_of_all).square()
    variance = (squares * weights).sum(0) / total
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(mean_of_all * momentum)
        running_var.mul_(1 - momentum).add_(variance * total / (total - 1) * momentum)
    return mean_of_all, (variance + eps).rsqrt()


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    y = (x.float() - _per_channel(mean, x)) * _per_channel(invstd, x)
    y = y if weight is None else y * _per_channel(weight, x)
    return (y if bias is None else y + _per_channel(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad = grad.float()
    sum_dy = grad.sum(_over(x))
    sum_dy_xmu = (grad * (x.float() - _per_channel(mean, x))).sum(_over(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def batch_norm_backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum()
    rest = grad.float() - _per_channel(sum_dy / total, x)
    slope = _per_channel(invstd.square() * sum_dy_xmu / total, x)
    rest = rest - (x.float() - _per_channel(mean, x)) * slope
    return (rest * _per_channel(invstd if weight is None else invstd * weight, x)).to(x.dtype)


# -- recurrent cells ------------------------------------------------------------------------------


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new hidden and cell state, and the gates after their functions."""
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - tanh.square())
    grad_c = grad_c if grad_cy is None else grad_c + grad_cy
    of_gates = (
        grad_c * g * i * (1 - i),
        grad_c * cx * f * (1 - f),
        grad_c * i * (1 - g.square()),
        grad_hy * tanh * o * (1 - o),
    )
    grad_gates = torch.cat(of_gates, 1)
    grad_bias = grad_gates.sum(0) if has_bias else grad_gates.new_empty(0)
    return grad_gates, grad_c * f, grad_bias


KERNELS = {
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
}
