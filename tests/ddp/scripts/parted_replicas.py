"""Two replicas of a sharded model that begin with other numbers, on the device or with `offload`,
or are parted `later`."""

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

is_parted_later = sys.argv[1:] == ["later"]
run = start(replicas=2)
# As GPUs of two kinds draw other numbers from the same state of their generators.
torch.manual_seed(run.rank)
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
run.fully_shard(model, [model[0]], offload=sys.argv[1:] == ["offload"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.arange(64.0).reshape(8, 8) / 64
batches = run.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
run.track(model=model, optimizer=optimizer)
if is_parted_later and run.rank == 1:
    with torch.no_grad():
        weight: Any = next(model.parameters())
        weight.to_local().add_(1.0)
for _ in run.epochs(2):
    for features, target in batches:
        loss = nn.functional.mse_loss(model(features), target)
        run.backward(loss)
        run.update(optimizer)
        run.step(loss=loss)
parameters: Any = [*model.parameters()]
weights = run.gather([parameter.to_local() for parameter in parameters])
run.print("EQUAL", all(map(torch.equal, *weights)))
run.finish()
