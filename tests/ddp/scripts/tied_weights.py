"""A model whose head is tied to its embedding, made on meta or not, in the units of
``run.fully_shard`` or in a plan: ``tied_weights.py unit | rest | plan | half [meta]``. It trains
beside a copy, as a whole, of one that is not made on meta."""

import contextlib
import copy
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hpc_ddp.training import start


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.block(self.words(numbers)))
        return output


case = sys.argv[1]
run = start(seed=1, tp=2 if case in ("plan", "half") else 1, save_every=None)
with torch.device("meta") if "meta" in sys.argv else contextlib.nullcontext():
    model = Tied()
whole = model if "meta" in sys.argv else copy.deepcopy(model).to(run.device)
PLANS = {
    "words": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
if case in ("plan", "half"):
    names = ["words", "head"] if case == "plan" else ["words"]
    run.parallelize(model, {name: PLANS[name] for name in names})
else:
    run.fully_shard(model, [model.words, model.block] if case == "unit" else [model.block])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
run.track(model=model, optimizer=optimizer)
numbers = torch.arange(16, device=run.device)
for _ in run.steps(2):
    run.backward(model(numbers).square().mean())
    run.update(optimizer)
    if whole is not model:
        gradients = torch.autograd.grad(whole(numbers).square().mean(), [*whole.parameters()])
        with torch.no_grad():
            torch._foreach_sub_([*whole.parameters()], gradients)
    run.step()
with run.evaluating(model) as plain:
    weight: Any = plain.words.weight
    weight = getattr(weight, "full_tensor", lambda: weight)()
    expected: Any = weight if whole is model else whole.words.weight
    torch.testing.assert_close(weight.detach(), expected.detach())
    print("TIED", len([*plain.parameters()]), plain.head.weight is plain.words.weight)
run.finish()
