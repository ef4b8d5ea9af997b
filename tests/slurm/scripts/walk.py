"""Trains a little, slowly, with whatever trouble it is told to meet on the way.

The trouble changes nothing about the numbers: all runs of it with as many ranks end the same.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch

from hpc_ddp.training import start
from hpc_ddp.training.checkpoint.storage import disk

parser = argparse.ArgumentParser()
parser.add_argument("--step-seconds", type=float, default=0.05)
parser.add_argument("--save-every-steps", type=int, default=10)
parser.add_argument("--write-seconds", type=float, default=0.0, help="a slow disk, per file")
parser.add_argument("--hold-at", type=int, nargs="*", default=[], help="for a notice, once each")
parser.add_argument("--hold-start", help="the attempt that stands still before it starts")
parser.add_argument("--raise-once-at", type=int, help="rank 1 raises there, the first time")
parser.add_argument("--die-at", type=int, help="rank 1 kills itself there, each time")
parser.add_argument("--die-from", type=int, help="all raise there and later, never the same error")
args = parser.parse_args()

if args.hold_start and args.hold_start == os.environ["HPC_DDP_ATTEMPT"]:
    time.sleep(600)
if args.write_seconds:
    write_file = disk.write_file

    def slowly(*words, **place):  # type: ignore[no-untyped-def]
        time.sleep(args.write_seconds)
        return write_file(*words, **place)

    disk.write_file = slowly


def hold(step: int) -> None:
    """Have rank 0, and so all ranks, wait for a notice, so that a test is never too late."""
    mark = Path(os.environ["HPC_DDP_RUN"], f"held-{step}")
    if run.rank == 0 and not mark.exists():
        mark.touch()
        while not run._notices.reason:
            time.sleep(0.01)


run = start(save_every=None, save_every_steps=args.save_every_steps)
model = run.wrap(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
batches = run.loader(torch.utils.data.TensorDataset(torch.randn(1600, 8)), batch_size=4)
run.track(model=model, optimizer=optimizer)
marker = Path(os.environ.get("HPC_DDP_RUN", "."), "raised")
for _ in run.epochs(1):
    for (x,) in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        run.backward(loss)
        optimizer.step()
        time.sleep(args.step_seconds)
        run.step(loss=loss)
        step = run.position.step
        if step in args.hold_at:
            hold(step)
        if step == args.raise_once_at and run.rank == 1 and not marker.exists():
            marker.touch()
            raise ValueError("this happens once")
        if step == args.die_at and run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if args.die_from and step >= args.die_from:
            raise ValueError(f"at {time.time()}")
run.print("walked")
run.finish()
