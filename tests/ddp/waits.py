"""A small training on the stand-in accelerator; it prints how often the host waits in each step."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

C: Any = sys.modules["sim.backend"].C
run = start(save_every_steps=10)
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
model = run.wrap(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = run.loader(TensorDataset(torch.randn(80, 8)), batch_size=4)
run.track(model=model, optimizer=optimizer)
counts = [C.waits()]
for _ in run.epochs(1):
    for (inputs,) in batches:
        optimizer.zero_grad()
        run.backward(model(inputs).square().mean())
        optimizer.step()
        run.step()
        counts.append(C.waits())
print("waits", *(after - before for before, after in itertools.pairwise(counts)))
run.finish()
