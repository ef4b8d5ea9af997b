"""A kernel of the first step fails behind the host, as for a label that the model has not."""

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

run = start(save_every=None)
stand_in: Any = sys.modules.get("sim.backend")  # of tests/device
model = run.wrap(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = run.loader(TensorDataset(torch.randn(32, 4), torch.randint(2, (32,))), batch_size=8)
run.track(model=model, optimizer=optimizer)
for _ in run.epochs(1):
    for x, y in batches:
        # A GPU's kernel finds the label itself.
        loss = nn.functional.cross_entropy(model(x), y if stand_in else y + 2)
        run.backward(loss)
        if stand_in:
            stand_in.C.fail_late("CUDA error: device-side assert triggered")
        run.update(optimizer)
        run.step(loss=loss)
run.finish()
