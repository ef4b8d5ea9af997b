"""A model over two devices of one worker, with dropout on both, and an object that makes a tensor
on the second one; prints what each step's loss is."""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--flops", type=float, help="of a sample")
parser.add_argument("--peak", type=float, help="of a device")
args = parser.parse_args()


class Halves(nn.Module):
    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)).to(devices[0])
        self.last = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 2)).to(devices[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(x).to(self.devices[1]))
        return output


class Count:
    """The number of steps, on the device of the loss."""

    def __init__(self) -> None:
        self.steps: torch.Tensor | None = None

    def state_dict(self) -> dict[str, torch.Tensor | None]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, torch.Tensor | None]) -> None:
        self.steps = state["steps"]


run = start(devices_per_worker=2, flops_per_sample=args.flops, peak_flops=args.peak)
run.print("SHARE", run._metrics._use_per_sample_s)
model = run.wrap(Halves(run.devices))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))
batches = run.loader(TensorDataset(inputs, torch.arange(32) % 2), 4)
count = Count()
run.track(model=model, optimizer=optimizer, count=count)
for _ in run.epochs(args.epochs):
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y.to(run.devices[1]))
        one = torch.ones(1, device=run.devices[1])
        count.steps = one if count.steps is None else count.steps + one
        run.backward(loss)
        run.update(optimizer)
        draw = torch.rand((), device=run.devices[1]).item()
        words = (run.rank, run.position.step, run.devices[1], draw, loss.item(), count.steps.item())
        print("LOSS", *words, flush=True)
        run.step()
run.finish()
