"""A large model that is not trained, below one that is; the script changes it in step 3:
``frozen_weights.py EPOCHS [again]``. It prints a sum of all weights' bytes."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

run = start(seed=1, save_every_steps=1)
backbone = nn.Linear(800, 800).requires_grad_(False)
if sys.argv[2:]:  # the checkpoint has the numbers
    nn.init.constant_(backbone.weight, torch.nan)
model = run.wrap(nn.Sequential(backbone, nn.Linear(800, 1)))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
data = torch.randn(32, 800, generator=torch.Generator().manual_seed(2))
batches = run.loader(TensorDataset(data), batch_size=4)
run.track(model=model, optimizer=optimizer)
for _ in run.epochs(int(sys.argv[1])):
    for (x,) in batches:
        run.backward(model(x).square().mean())
        run.update(optimizer)
        if run.position.step == 2:
            with torch.no_grad():
                backbone.weight.add_(1.0)
        run.step()
numbers = torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()])
print("SUM", numbers.view(torch.int32).to(torch.int64).sum().item(), numbers.isnan().any().item())
run.finish()
