"""A pipeline whose loss is a number of bf16, as a loss function under autocast may return it."""

import torch
from torch import nn

from hpc_ddp.training import start

run = start(pp=2)
layers = (
    [nn.Linear(4, 4), nn.BatchNorm1d(4)] if run.mesh["pp"].get_local_rank() else [nn.Linear(4, 4)]
)
stage = run.wrap(nn.Sequential(*layers), sync_batchnorm=True)
pipeline = run.pipeline(
    stage, lambda output, target: (output - target).square().mean().bfloat16(), n_microbatches=2
)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
run.track(stage=stage, optimizer=optimizer)
inputs = torch.full((4, 4), 0.5, device=run.device)
loss = pipeline.step(inputs, inputs)
print(f"LOSS {loss.dtype} {loss.item()!r}", flush=True)
run.finish()
