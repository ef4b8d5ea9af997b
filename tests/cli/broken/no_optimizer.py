"""Forgets its optimizer: momentum is lost at each resume."""

import torch
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

run = start(progress=False)
x = torch.randn(96, 3)
model = run.wrap(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
batches = run.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
run.track(model=model)
for _ in run.epochs(4):
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        run.backward(loss)
        optimizer.step()
        run.step(loss=loss)
run.finish()
