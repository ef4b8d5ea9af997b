"""A script whose own collectives send tensors of the CPU, beside gradients of the device."""

import torch
import torch.distributed as dist
from torch import nn

from hpc_ddp.training import start

run = start(seed=0, save_every=None, backend="cpu:gloo,cuda:nccl,sim:simccl")
model = run.wrap(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for _ in run.steps(2):
    run.backward(model(torch.rand(2, 3, device=run.device)).mean())
    optimizer.step()
    run.step()
on_cpu, on_device = torch.ones(1), torch.ones(1, device=run.device)
dist.all_reduce(on_cpu)
dist.all_reduce(on_device)
print("SUMS", on_cpu.item(), on_device.item())
run.finish()
