"""A model with an expert that DDP leaves to each rank, in fp16, with an optimizer and a schedule of
its own: they are updated from the first step on, and it is used from the fourth on."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from hpc_ddp.training import start


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.expert(self.gate(x))
        return output


run = start(seed=1, save_every=None, precision="fp16")
net = Mixture()
ddp: Any = DistributedDataParallel
ddp._set_params_and_buffers_to_ignore_for_model(net, ["expert.weight", "expert.bias"])
mixture, first = run.wrap(net), run.wrap(nn.Linear(8, 8))
of_mixture = torch.optim.SGD(mixture.parameters(), lr=0.1)
of_first = torch.optim.SGD(first.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(of_mixture, 1)
batches = run.loader(TensorDataset(torch.ones(96, 8)), batch_size=8)
objects: dict[str, Any] = {"of_mixture": of_mixture, "of_first": of_first, "schedule": schedule}
run.track(mixture=mixture, first=first, **objects)
for _ in run.epochs(1):
    for (x,) in batches:
        with run.autocast():
            output = first(x)
            if run.position.step >= 3:
                output = mixture(output)
        run.backward(output.float().square().mean())
        run.update(of_first)
        run.update(of_mixture, scheduler=schedule)
        run.step()
print("STEPS", run.position.step, schedule.last_epoch, net.gate.weight.sum().item())
run.finish()
