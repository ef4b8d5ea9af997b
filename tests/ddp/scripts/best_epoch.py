"""The training of test_export.py: the best of three epochs, loaded back behind the loop."""

import argparse
import os
import signal
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

parser = argparse.ArgumentParser()
parser.add_argument("--scores", type=float, nargs="+", default=[1.0, 3.0, 2.0])
parser.add_argument("--kill", choices=["before", "after"], help="the loading of the best")
args = parser.parse_args()

run = start()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(64, 4)
batches = run.loader(TensorDataset(x, x.argmax(1) % 3), batch_size=8)
run.track(model=model, optimizer=optimizer)
best: dict[str, Any] = {}
for epoch in run.epochs(len(args.scores)):
    for inputs, targets in batches:
        run.backward(nn.functional.cross_entropy(model(inputs), targets))
        run.update(optimizer)
        run.step()
    if run.best(args.scores[epoch]):
        with run.evaluating(model) as plain:
            best = {name: value.clone() for name, value in plain.state_dict().items()}

if args.kill == "before":
    os.kill(os.getpid(), signal.SIGKILL)
step = run.load_best(model)
run.print(f"BEST {step}")
if args.kill == "after":
    run.sum()  # all of them have it
    os.kill(os.getpid(), signal.SIGKILL)
with run.evaluating(model) as plain:
    assert not best or all(torch.equal(best[k], value) for k, value in plain.state_dict().items())
    if run.rank == 0:
        torch.save((x, plain(x.to(run.device)).cpu()), run.folder.path / "expected.pt")
run.finish()
