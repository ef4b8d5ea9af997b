"""A sharded model's peak of device memory, in MB, with one micro-batch in a step, and with four."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

run = start(save_every=None, precision="bf16")
layers = [nn.Linear(256, 256) for _ in range(24)]
model = run.fully_shard(nn.Sequential(*layers), units=layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
device = torch.get_device_module(run.device)
batches = run.loader(TensorDataset(torch.randn(64, 256)), 4, accumulate=int(sys.argv[1]))
run.track(model=model, optimizer=optimizer)
for _ in run.epochs(1):
    for (x,) in batches:
        with run.autocast():
            loss = model(x).square().mean()
        run.backward(loss)
        run.update(optimizer)
        run.step()
share = 4 * sum(parameter.numel() for parameter in model.parameters()) / run.world_size / 1e6
run.print(f"PEAK {device.max_memory_allocated() / 1e6:.2f} SHARE {share:.2f}")
run.finish()
