"""A training in which one rank takes longer than the others, by its work or by its data."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from hpc_ddp.core.journal.stragglers import slow_rank
from hpc_ddp.training import start
from hpc_ddp.training.telemetry import step_timing

parser = argparse.ArgumentParser()
parser.add_argument("--slow", type=int, default=-1, help="this rank")
parser.add_argument("--in", dest="place", choices=("work", "data"), default="work")
parser.add_argument("--norm", action="store_true", help="a batch norm, whose buffers are rank 0's")
parser.add_argument("--sharded", action="store_true", help="FSDP2 in place of DDP")
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
step_timing.EVERY_S = 0.2
STEP_S, MORE_S = 0.01, 0.06


class Drawn(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if run.rank == args.slow and args.place == "data":
            time.sleep(MORE_S / 4)
        return torch.randn(64)


class Slept(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_S + MORE_S * (run.rank == args.slow and args.place == "work"))
        return x


run = start(save_every=None)
parts = [nn.Linear(64, 64), nn.BatchNorm1d(64) if args.norm else nn.ReLU(), Slept()]
net = nn.Sequential(*parts, nn.Linear(64, 64))
model = run.fully_shard(net, [net[0], net[3]]) if args.sharded else run.wrap(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = run.loader(Drawn(), 4, accumulate=args.accumulate)
run.track(model=model, optimizer=optimizer)
for _ in run.epochs(1):
    for x in batches:
        run.backward(model(x).pow(2).mean())
        run.update(optimizer)
        run.step()
        slow = slow_rank(run.folder.events()) if run.rank == 0 else None
        if run.sum(slow is not None and slow.rank == args.slow)[0]:
            break
run.finish()
