"""Adds noise from a generator that nobody has seeded: no two runs are equal."""

import numpy
import torch
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

run = start(progress=False)
x = torch.randn(96, 3)
noise = numpy.random.default_rng()
model = run.wrap(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = run.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
run.track(model=model, optimizer=optimizer)
for _ in run.epochs(4):
    for inputs, targets in batches:
        optimizer.zero_grad()
        moved = inputs + torch.from_numpy(noise.normal(size=inputs.shape)).to(inputs)
        loss = torch.nn.functional.mse_loss(model(moved), targets)
        run.backward(loss)
        optimizer.step()
        run.step(loss=loss)
run.finish()
