"""What each rank has its own of: a loader's position, weights that DDP ignores, a local SGD."""

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_ddp.core.journal.enums import StopReason
from hpc_ddp.core.journal.events import Stopped
from hpc_ddp.training import start

parser = argparse.ArgumentParser()
parser.add_argument("way", choices=("loader", "ignored", "local"))
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--per-rank", nargs="*", default=())
args = parser.parse_args()


class Loader:
    """As torchdata's StatefulDataLoader: where a rank stands differs from rank to rank."""

    def __init__(self) -> None:
        self.place, self.buffer = 0, torch.empty(0)

    def draw(self) -> None:
        self.place += run.rank + 1
        self.buffer = torch.arange(float(self.place - 1))  # of another length on each rank

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.place, self.buffer = int(str(state["place"])), torch.as_tensor(state["buffer"])


run = start(save_every=None)
second = nn.Linear(4, 4)
model = nn.Sequential(nn.Linear(4, 4), second)
if args.way == "ignored":
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.uses"])
    second.register_buffer("uses", torch.full((), float(run.rank)))
    nn.init.constant_(second.weight, float(run.rank))
wrapped = model.to(run.device) if args.way == "local" else run.wrap(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
loader = Loader()
objects: dict[str, Any] = {"loader": loader} if "loader" in args.per_rank else {}
run.track(model=wrapped, optimizer=optimizer, **objects, per_rank=args.per_rank)
for _ in run.epochs(1):
    while run.position.step < args.steps:
        loader.draw()
        x = torch.full((2, 4), float(run.rank + 1), device=run.device)
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for uses in second.buffers():
            uses += run.rank + 1
        run.step()
        if run.position.step == args.steps // 2:
            run._manager.save()
    break  # before the epoch counts as done
weights = [round(each.sum().item(), 4) for each in model.state_dict().values()]
print(f"RANK {run.rank}: place {loader.place} buffer {len(loader.buffer)} weights {weights}")
run._end(Stopped(run.position.step, StopReason.NOTICE))  # it can go on
