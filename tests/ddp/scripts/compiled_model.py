"""A compiled model; prints whether the compiler was told not to choose by measuring."""

import importlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

config: Any = importlib.import_module("torch._inductor.config")
graphs: Any = importlib.import_module("torch._inductor.graph").GraphLowering
lower = graphs.__init__


def noted(self: Any, *args: Any, **options: Any) -> None:
    print("LOWERED", getattr(config, "deterministic", True), flush=True)
    lower(self, *args, **options)


graphs.__init__ = noted
run = start()
model = run.wrap(nn.Linear(4, 2), compile=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = run.loader(TensorDataset(torch.randn(16, 4)), 8)
run.track(model=model, optimizer=optimizer)
for _ in run.epochs(1):
    for (x,) in batches:
        run.backward(model(x).square().mean())
        run.update(optimizer)
        run.step()
run.finish()
