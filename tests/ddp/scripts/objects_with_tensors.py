"""Objects that keep the tensors which they are given, a parameter that is one number, and a data
set that lies on the device."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from hpc_ddp.training import start


class Center:
    """A running mean, as of DINO's outputs, a conjugate that is not computed yet, and the mean of
    the first batch."""

    def __init__(self, device: torch.device) -> None:
        self.mean = torch.zeros(4, device=device)
        self.phase = torch.tensor([1 + 2j]).to(device)
        self.first: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        conjugates = [self.phase.conj()]
        return {"means": [self.mean], "conjugates": conjugates, "first": self.first}

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        (self.mean,), (conjugate,) = state["means"], state["conjugates"]
        self.phase = conjugate.conj()
        self.first = state["first"]


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.logit_scale


class Drawn(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index), device=run.device)


run = start()
model = run.wrap(Scaled())
rate = torch.tensor(0.01, device=run.device)
optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=run.device.type != "cpu")
center = Center(run.device)
average = run.ema(model).to("cpu")  # where there is room for it
batches = run.loader(Drawn(), 4)
run.track(model=model, optimizer=optimizer, center=center, average=average)
for _ in run.epochs(int(sys.argv[1])):
    for x in batches:
        output = model(x)
        mean = output.detach().mean(0)
        dist.all_reduce(mean)  # what ranks track is the same on all
        center.first = center.first or [mean.clone()]
        center.mean = center.mean * 0.9 + mean * 0.05 + center.first[0] * 0.05
        run.backward((output - center.mean).square().mean())
        run.update(optimizer)
        average.update_parameters(model)
        run.step()
rate = optimizer.param_groups[0]["lr"]
phase = center.phase.cpu().resolve_conj().item()
kinds = center.mean.device.type, rate.device.type, center.first[0].device.type
highest = max(run.gather(center.mean.sum()))  # tensors of all ranks, none on another's device
print("KEPT", *kinds, highest.device.type, highest.item(), phase, flush=True)
run.finish()
