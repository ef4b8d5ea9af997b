"""A model whose first weights are complex, as those of a Fourier neural operator; of others the
gradients are sparse, and a buffer is a conjugate. With an argument it is the backend."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_ddp.training import start


class Spectral(nn.Module):
    phase: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(1))
        self.words = nn.Embedding(5, 4, sparse=True)
        self.register_buffer("phase", torch.full((2,), 1j).conj())

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        x = self.words(number)
        output: torch.Tensor = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4) * self.scale
        return output


backend: Any = sys.argv[1] if len(sys.argv) > 1 else None
run = start(seed=0, save_every=None, backend=backend)
net = Spectral()
calls: list[torch.Tensor] = []
scale: Any = net.scale
scale.register_post_accumulate_grad_hook(calls.append)  # as an optimizer in the backward does
scale.register_hook(lambda gradient: calls.append(gradient))
model = run.wrap(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for _ in run.steps(2):
    numbers = torch.randint(5, (2,), device=run.device)  # each rank's own
    run.backward(model(numbers).square().mean())
    run.update(optimizer)
    run.step()
with run.evaluating(model):
    weights = [torch.view_as_real(net.weight), net.words.weight, torch.view_as_real(net.phase + 0)]
flat = torch.cat([weight.detach().reshape(-1) for weight in weights])
first = flat.clone()
dist.broadcast(first, src=0)
have_moved = torch.view_as_real(net.weight)[:, 0].ne(1).all().item()
state = "equal" if torch.equal(flat, first) else "different"
print("WEIGHTS", state, "and", "moved" if have_moved else "not", "after", len(calls), "hooks")
run.finish()
