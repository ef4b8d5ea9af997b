"""Training of a model that is shared out before a device has it, and counts of what that costs."""

import argparse
import json
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

parser = argparse.ArgumentParser()
parser.add_argument("--meta", action="store_true", help="make the model on torch's meta device")
parser.add_argument("--offload", action="store_true")
parser.add_argument("--average", action="store_true", help="keep an average of the weights")
parser.add_argument("--late-average", action="store_true", help="ask for one of a sharded model")
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--lose", help="leave a tensor of the model without numbers")
parser.add_argument("--limit", type=int, help="bytes that a device may hold, of the stand-in only")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.scale = nn.Parameter(torch.ones(64))
        self.register_buffer("shift", torch.zeros(64), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        if args.lose != "shift":
            nn.init.zeros_(self.shift)  # type: ignore[arg-type]  # a buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.down(self.up(x).relu()) * self.scale + self.shift
        return output


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.last.weight = self.first.weight  # tied
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.last(x)
        return output


run = start(tp=args.tp)
stand_in: Any = sys.modules.get("sim.backend")  # of tests/device
if args.limit and stand_in:
    stand_in.C.set_limit(run.device.index, args.limit)
with torch.device("meta" if args.meta else "cpu"):
    model = Model()
average = run.ema(model, 0.5) if args.average else None
for trained in (model, *([average.module] if average else [])):
    blocks = trained.blocks
    assert isinstance(blocks, nn.ModuleList)
    if args.tp > 1:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        run.parallelize(trained, plan)
    run.fully_shard(trained, blocks, offload=args.offload)
assert model.last.weight is model.first.weight
if args.late_average:
    run.ema(model)


def sums_of_weights() -> dict[str, float]:
    sums = {}
    for name, weight in model.named_parameters():
        there: Any = weight.detach().to(run.device)
        full = getattr(there, "full_tensor", lambda there=there: there)()
        sums[name] = full.double().sum().item()
    return sums


sums = sums_of_weights()
inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
if args.epochs:  # an optimizer takes the parameters that it then has
    with run.evaluating(model) as plain:
        plain(inputs[:4].to(run.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = run.loader(TensorDataset(inputs, inputs.flip(0)), 4)
objects: dict[str, Any] = {"model": model, "optimizer": optimizer} | (
    {"average": average} if average else {}
)
run.track(**objects)
loss = torch.zeros(())
for _ in run.epochs(args.epochs):
    for x, y in batches:
        run.backward(nn.functional.mse_loss(model(x), y))
        run.update(optimizer, clip_norm=1.0)
        if average:
            average.update_parameters(model)
        # The next step trains, and averages, what an evaluation has gathered.
        with run.evaluating(average.module if average else model) as plain:
            loss = nn.functional.mse_loss(plain(x), y)
        run.step()
frozen = [name for name, number in sums_of_weights().items() if number == sums[name]]
result = {"sums": sums, "loss": loss.item(), "step": run.position.step, "frozen": frozen}
if run.rank == 0:
    (run.folder.path / "result.json").write_text(json.dumps(result))
run.finish()
