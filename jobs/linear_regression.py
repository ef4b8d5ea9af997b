"""Fit a line through noisy points: all that a training loop needs of hpc-ddp, on one screen.

One process, the two of one node, two nodes of a cluster, and two nodes played here::

    python jobs/linear_regression.py
    hpc-ddp submit --nodes 1 --gpus-per-node 2 --time 5:00 jobs/linear_regression.py
    hpc-ddp submit --nodes 2 --gpus-per-node 4 --time 5:00 jobs/linear_regression.py
    hpc-ddp dry-run --nodes 2 --gpus-per-node 2 jobs/linear_regression.py
"""

import argparse

import torch
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

parser = argparse.ArgumentParser(description="Fit y = 3 x + 1 to 400 noisy points.")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=10, help="points per process and step")
parser.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

run = start(seed=args.seed)
x = torch.randn(400, 1)  # `start` has seeded: all ranks draw the same points, then share them
y = 3 * x + 1 + 0.1 * torch.randn(400, 1)
model = run.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
batches = run.loader(TensorDataset(x, y), batch_size=args.batch_size)
run.track(model=model, optimizer=optimizer)

for epoch in run.epochs(args.epochs):
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        run.backward(loss)
        optimizer.step()
        run.step(loss=loss)
    run.print(f"epoch {epoch}  step {run.position.step}  loss {loss.item():.4f}")

slope, offset = (parameter.item() for parameter in model.parameters())
run.print(f"y = {slope:.3f} x + {offset:.3f}")
run.finish(slope=slope, offset=offset)
