"""Augments with a generator of its own, which begins anew at each resume."""

import random

import torch
from torch.utils.data import Dataset

from hpc_ddp.training import start


class Shifted(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points, each moved a little by chance."""

    def __init__(self) -> None:
        self.x = torch.randn(96, 3)
        self.chance = random.Random(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + self.chance.random(), self.x[index].sum().reshape(1)


run = start(progress=False)
points = Shifted()
model = run.wrap(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = run.loader(points, batch_size=16)
run.track(model=model, optimizer=optimizer)
for _ in run.epochs(4):
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        run.backward(loss)
        optimizer.step()
        run.step(loss=loss)
run.finish()
