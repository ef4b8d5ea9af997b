"""Batches of a number of tokens, drawn with weights, and two optimizers in each step."""

import argparse
import os
import subprocess
import time
from typing import Any

import torch
from torch import nn

from hpc_ddp.training import start

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="fp32")
parser.add_argument("--at", type=int, help="the step in which each rank gets SIGTERM")
args = parser.parse_args()

run = start(precision=args.precision)
made = torch.Generator().manual_seed(1)
texts = [torch.randint(11, (int(n),), generator=made) for n in torch.randint(2, 30, (40,))]
weights = torch.rand(40, generator=made)  # how often a text is drawn
plain = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 11))
model = run.wrap(plain)
matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and ".0." not in name]
others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
optimizers: list[Any] = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
run.track(model=model, muon=optimizers[0], adamw=optimizers[1])


def draw(tokens: int) -> torch.Tensor:
    """Return texts of at most so many tokens in a row, others on each rank."""
    batch: list[torch.Tensor] = []
    while True:
        text = texts[int(torch.multinomial(weights, 1))]
        if sum(map(len, batch)) + len(text) > tokens:
            return torch.cat(batch)
        batch.append(text)


for step in run.steps(20):
    tokens = draw(40 + 10 * (step % 3)).to(run.device)
    count = len(tokens) - 1
    with run.autocast():
        total = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="sum")
    # DDP averages over the ranks: this makes it the mean over the tokens of all of them.
    (all_tokens,) = run.sum(count)
    run.backward(total * run.world_size / all_tokens)
    for optimizer in optimizers:
        run.update(optimizer)
    if args.at:
        time.sleep(0.1)  # so that the ranks exchange their notices at every step or two
    if step + 1 == args.at:
        subprocess.run(["kill", str(os.getpid())], check=True)
    run.step(tokens=count)
print(f"RANK {run.rank}: {[round(p.sum().item(), 6) for p in plain.parameters()]}")
run.finish()
