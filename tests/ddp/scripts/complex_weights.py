"""A model whose first weights are complex, as those of a Fourier neural operator."""

import torch
import torch.distributed as dist
from torch import nn

from hpc_ddp.training import start


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4) * self.scale
        return output


run = start(seed=0, save_every=None)
net = Spectral()
model = run.wrap(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for _ in run.steps(2):
    x = torch.randn(2, 4, device=run.device)  # each rank's own
    run.backward(model(x).square().mean())
    run.update(optimizer)
    run.step()
weight = torch.view_as_real(net.weight.detach()).clone()
first = weight.clone()
dist.broadcast(first, src=0)
are_equal, have_moved = torch.equal(weight, first), weight[:, 0].ne(1).all().item()
print("WEIGHTS", "equal" if are_equal else "different", "and", "moved" if have_moved else "not")
run.finish()
