"""Divides the loss by a running mean of it, which no checkpoint holds."""

import torch
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

run = start(progress=False)
x = torch.randn(96, 3)
model = run.wrap(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = run.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
run.track(model=model, optimizer=optimizer)
mean = 1.0
for _ in run.epochs(4):
    for inputs, targets in batches:
        optimizer.zero_grad()
        error = torch.nn.functional.mse_loss(model(inputs), targets)
        mean = 0.9 * mean + 0.1 * error.item()
        loss = error / mean
        run.backward(loss)
        optimizer.step()
        run.step(loss=loss)
run.finish()
