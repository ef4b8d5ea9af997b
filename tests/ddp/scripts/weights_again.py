"""Lines before the loop and at the top of an epoch change weights; sharded with `--shard`. The
first ones are steps, as they warm up a CUDA graph, which then knows where the state lies.

``weights_again.py [--shard] [--stop-at N]``: the first attempt stops at that step.
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start
from hpc_ddp.training.stops.signals import NOTICE

stop_at = int(sys.argv[-1]) if "--stop-at" in sys.argv else 0
run = start()
plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
model = run.fully_shard(plain, plain) if "--shard" in sys.argv else run.wrap(plain)
teacher = nn.Linear(4, 4).to(run.device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
batches = run.loader(TensorDataset(inputs), global_batch_size=8)
run.track(model=model, optimizer=optimizer, teacher=teacher)
for _ in range(3):
    model(inputs[:8].to(run.device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
states = [value for entry in optimizer.state.values() for value in entry.values()]
with torch.no_grad():
    for weight in plain.parameters():
        weight.mul_(0.5)
    teacher.weight.fill_(0.1)
for _ in run.epochs(3):
    if run.rank == 0:  # a look by one rank alone
        next(iter(batches))
    teacher.weight.data.mul_(1.5)
    for (x,) in batches:
        loss = (model(x) - teacher(x).detach().mean(1, keepdim=True)).square().mean()
        run.backward(loss)
        run.update(optimizer)
        if run.position.step + 1 == stop_at and not run.resumed:
            run._notices.reason = NOTICE
        run.step(loss=loss)
later = [value for entry in optimizer.state.values() for value in entry.values()]
is_moved = any(value is not before for value, before in zip(later, states, strict=True))
print("TENSORS", "others" if is_moved else "the same")
print(f"rank {run.rank}: weights {teacher.weight.sum():.9g}, loss {loss:.9g}")
run.finish()
