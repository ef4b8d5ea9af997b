"""A pipeline whose loss is a number of bf16, as a loss function under autocast may return it."""

from typing import Any

import torch
from torch import nn

from hpc_ddp.training import start


class Autocasts(torch.autograd.Function):
    """Notes whether a forward and its backward are under autocast."""

    notes: list[bool] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Autocasts.notes.append(torch.is_autocast_enabled(x.device.type))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        Autocasts.notes.append(torch.is_autocast_enabled(grads[0].device.type))
        return grads[0]


class Probe(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return Autocasts.apply(x) if torch.is_grad_enabled() else x


run = start(pp=2, precision="bf16")
layers = [nn.Linear(4, 4), Probe()]
if run.mesh["pp"].get_local_rank():
    layers.append(nn.BatchNorm1d(4))
stage = run.wrap(nn.Sequential(*layers), sync_batchnorm=True)
pipeline = run.pipeline(
    stage, lambda output, target: (output - target).square().mean().bfloat16(), n_microbatches=2
)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
run.track(stage=stage, optimizer=optimizer)
inputs = torch.full((4, 4), 0.5, device=run.device)
loss = pipeline.step(inputs, inputs)
print(f"LOSS {loss.dtype} {loss.item()!r}", flush=True)
print("AUTOCASTS", *sorted(Autocasts.notes), flush=True)
run.finish()
