"""An epoch's first line lowers the learning rate and draws a number; the batches come from a loader
of torchdata's, which is tracked. The first attempt is killed in the step `--kill-at`, or behind it,
where an epoch's batches end, in the evaluation."""

import argparse
import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hpc_ddp.training import start

parser = argparse.ArgumentParser()
parser.add_argument("--kill-at", type=int, default=0)
parser.add_argument("--steps", action="store_true", help="passes follow each other in run.steps")
args = parser.parse_args()

run = start(save_every=None, save_every_steps=3)
model = run.wrap(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
inputs = torch.arange(12.0).view(6, 2)
batches = StatefulDataLoader(TensorDataset(inputs), 1, shuffle=True)
run.track(model=model, optimizer=optimizer, batches=batches, per_rank=("batches",))


def die() -> None:
    run._manager.settle()
    os._exit(9)


if args.steps:
    endless = (x for _ in iter(int, 1) for (x,) in batches)
    for step in run.steps(18):
        loss = model(next(endless)).square().mean()
        run.backward(loss)
        run.update(optimizer)
        print(f"RANK step {step + 1:2}: {loss:.6f}")
        if step + 1 == args.kill_at:
            die()
        run.step()
    run.finish()
    sys.exit()
for _ in run.epochs(3):
    optimizer.param_groups[0]["lr"] *= 0.5
    noise = torch.rand(())
    for (x,) in batches:
        loss = model(x).square().mean()
        run.backward(loss)
        run.update(optimizer)
        rate = optimizer.param_groups[0]["lr"]
        step = run.position.step + 1
        print(f"RANK step {step:2}: {x.tolist()} {rate} {noise:.6f} {loss:.6f}")
        if step == args.kill_at and step % 6:
            die()
        run.step()
    if run.position.step == args.kill_at:
        die()
    print(f"RANK step {run.position.step:2} done: {loss:.6f}")
run.finish()
