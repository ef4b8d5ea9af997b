"""An expert that DDP leaves to each rank, and a number of no module, beside weights that it
averages: ``own_experts.py fp32 | fp16``. One rank's expert overflows in step 6 with fp16."""

import sys
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
        self.expert.register_buffer("uses", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.expert(self.gate(x))
        if self.training:
            self.expert.get_buffer("uses").add_(output.detach().float().mean(0))
        return output


precision: Any = sys.argv[1]
run = start(seed=1, save_every_steps=2, precision=precision)
net = Mixture()
ignored = ["expert.weight", "expert.bias", "expert.uses"]
ddp: Any = DistributedDataParallel
ddp._set_params_and_buffers_to_ignore_for_model(net, ignored)
with torch.no_grad():
    net.expert.weight.mul_(1 + run.rank)
model = run.wrap(net)
scale = torch.ones((), device=run.device, requires_grad=True)
optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
calls: list[object] = []
optimizer.register_step_post_hook(lambda *args: calls.append(args))
inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(1)) * 5
batches = run.loader(TensorDataset(inputs), batch_size=8)
run.track(model=model, optimizer=optimizer)
norms = []
for _ in run.epochs(1):
    for (x,) in batches:
        with run.autocast():
            output = model(x) * scale
        run.backward(output.float().square().mean())
        gradient = net.expert.weight.grad
        if run.position.step == 6 and run.rank == 1 and precision == "fp16":
            assert gradient is not None
            gradient.fill_(torch.inf)
        norms.append(run.update(optimizer, clip_norm=1.0))
        run.step()
last: Any = norms[-1]
print("GATE", net.gate.weight.sum().item(), last.item(), len(calls))
with run.evaluating(model):
    print("USES", net.expert.get_buffer("uses").sum().item())
print("EXPERT", net.expert.weight.sum().item())
run.finish()
