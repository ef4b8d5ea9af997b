"""A first loop that is left by break behind its best epoch, and a second one."""

from typing import Any

import torch
from torch import nn

from hpc_ddp.training import start

run = start(save_every=None)
net = nn.Linear(1, 1, bias=False)
model = run.wrap(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
run.track(model=model, optimizer=optimizer)


def train_step() -> None:
    run.backward(model(torch.ones(1, 1, device=run.device)).sum())
    run.update(optimizer)
    run.step()


judged: Any = None
for _ in run.epochs(5):
    train_step()
    train_step()
    run.best(1.0)
    judged = net.weight.item()
    break
for _ in run.steps(9):
    train_step()
print("STEP", run.load_best(model), net.weight.item() == judged)
run.finish()
