"""Train a language model by steps, without epochs: batches are drawn at random from a text."""

import argparse
import math
import random

import torch
from hpc_ddp.training import start
from torch import nn
from torch.nn import functional as F

EVAL_ITERS = 4


def make_text(count):
    """Return that many lines like 28+7=35: a language of twelve letters to learn."""
    pick = random.Random(0)
    pairs = [(pick.randrange(100), pick.randrange(100)) for _ in range(count)]
    return "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)


class Model(nn.Module):
    """Guesses the next letter from all letters before it."""

    def __init__(self, letters, width, dropout):
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, letters)

    def forward(self, x, y):
        hidden, _ = self.rnn(self.embed(x))
        return F.cross_entropy(self.head(self.dropout(hidden)).flatten(0, 1), y.flatten())


def get_batch(split):
    data = train_data if split == "train" else val_data
    places = torch.randint(len(data) - args.block_size, (args.batch_size,))
    x = torch.stack([data[i : i + args.block_size] for i in places])
    y = torch.stack([data[i + 1 : i + 1 + args.block_size] for i in places])
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = {split: 0.0 for split in ("train", "val")}
    for split in losses:
        losses[split] = sum(model(*get_batch(split)).item() for _ in range(EVAL_ITERS)) / EVAL_ITERS
    model.train()
    return losses


def learning_rate(step):
    """Warm up, then decay by a cosine."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(args.steps - args.warmup, 1)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


parser = argparse.ArgumentParser(description="A small language model, trained by steps.")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--warmup", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=16, help="windows per process and micro-step")
parser.add_argument("--block-size", type=int, default=24, help="characters in a window")
parser.add_argument("--accumulate", type=int, default=2, help="micro-steps of a step")
parser.add_argument("--eval-every", type=int, default=20)
parser.add_argument("--lr", type=float, default=3e-3)
args = parser.parse_args()

run = start()
rank, device = run.rank, run.device

text = make_text(1000)
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
train_data, val_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

model = run.wrap(Model(len(letters), width=64, dropout=0.1))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
run.track(model=model, optimizer=optimizer)

for step in run.steps(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    if step % args.eval_every == 0:
        losses = estimate_loss(model.module)
        if rank == 0:
            print(f"eval {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
    for micro_step in range(args.accumulate):
        model.require_backward_grad_sync = micro_step == args.accumulate - 1
        loss = model(*get_batch("train")) / args.accumulate
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    run.step(loss=loss)

if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
run.finish()
