"""A learning rate that the top of an epoch lowers; stopped in that epoch by the first attempt."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start
from hpc_ddp.training.stops.signals import NOTICE

run = start()
model = run.wrap(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
batches = run.loader(TensorDataset(inputs), global_batch_size=8)
run.track(model=model, optimizer=optimizer)
for epoch in run.epochs(3):
    if epoch == 1:
        optimizer.param_groups[0]["lr"] *= 0.1
    for (x,) in batches:
        run.backward(model(x).square().mean())
        run.update(optimizer)
        if run.position.step == 5 and not run.resumed:
            run._notices.reason = NOTICE
        run.step()
print(f"rank {run.rank}: rate {optimizer.param_groups[0]['lr']:g}")
run.finish()
