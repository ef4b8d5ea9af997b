"""A semi-supervised training: labelled samples by the run's loader, and a stream without labels
whose place each rank keeps by itself."""

import argparse
import multiprocessing
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from hpc_ddp.training import start

parser = argparse.ArgumentParser()
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--at", type=int, help="the step in which each process of a rank gets SIGTERM")
args = parser.parse_args()


class Stream(IterableDataset[torch.Tensor]):
    """Endless numbers, others on each rank and in each worker, with a state of its own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.place = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        while True:
            self.place += 1
            yield torch.tensor([self.place, self.rank, info.id if info else 0]).sin()

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


run = start()
plain = nn.Linear(3, 3)
model = run.wrap(plain)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
numbers = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
labelled = run.loader(TensorDataset(numbers, numbers.flip(0)), 1)
unlabelled = StatefulDataLoader(Stream(run.rank), 2, num_workers=args.num_workers)
run.track(model=model, optimizer=optimizer, unlabelled=unlabelled, per_rank=("unlabelled",))
stream = iter(unlabelled)  # behind run.track: it goes on where it was
for _ in run.epochs(2):
    for x, y in labelled:
        samples = next(stream).to(run.device)
        loss = nn.functional.mse_loss(model(x), y) + model(samples).square().mean()
        run.backward(loss)
        run.update(optimizer)
        if args.at:
            time.sleep(0.1)  # so that the ranks exchange their notices at every step or two
        if run.position.step + 1 == args.at:
            pids = [process.pid for process in multiprocessing.active_children()]
            # From another process: a worker ends by a signal of its parent.
            subprocess.run(["kill", *map(str, pids), str(os.getpid())], check=True)
        run.step()
print(f"RANK {run.rank}: {[number.hex() for number in plain.weight.flatten().tolist()]}")
run.finish()
