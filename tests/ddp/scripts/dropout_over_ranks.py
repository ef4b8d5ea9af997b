"""A model that draws its dropout over the ranks which share it; prints each step's loss."""

import argparse
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

parser = argparse.ArgumentParser()
parser.add_argument("--pp", type=int, default=1)
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(self.linear(x), run.mesh["tp"], [Replicate()])
        parts = whole.redistribute(placements=[Shard(1)])
        drawn: Any = nn.functional.dropout(parts, 0.5, self.training)
        output: torch.Tensor = drawn.full_tensor()
        return output


run = start(tp=2, pp=args.pp)
inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))
batches = run.loader(TensorDataset(inputs, inputs.flip(0)), 4)
module = Dropped() if run.mesh["pp"].get_local_rank() == args.pp - 1 else nn.Linear(8, 8)
model = run.fully_shard(module, [])
pipeline = run.pipeline(model, nn.functional.mse_loss, n_microbatches=2) if args.pp > 1 else None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for _ in run.epochs(args.epochs):
    for x, y in batches:
        if pipeline:
            loss = pipeline.step(x, y)
        else:
            loss = nn.functional.mse_loss(model(x), y)
            run.backward(loss)
        run.update(optimizer)
        print("LOSS", run.rank, run.position.step, loss.item(), file=sys.stdout, flush=True)
        run.step()
run.finish()
