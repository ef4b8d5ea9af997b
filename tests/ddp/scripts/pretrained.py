"""Training of a sharded model that begins with the weights of a folder, and writes its own to one.

No rank has all of them: docs/trainers-day.md has these calls.
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

dcp: Any = checkpoint  # it has no types
parser = argparse.ArgumentParser()
parser.add_argument("source", help="a folder of torch.distributed.checkpoint")
parser.add_argument("--safetensors", action="store_true", help="it is one of Hugging Face's")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

run = start(save_every_steps=2)
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 6))
run.fully_shard(model, list(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
numbers = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
batches = run.loader(TensorDataset(numbers, numbers.flip(0)), 2)
run.track(model=model, optimizer=optimizer)
if not run.resumed:
    reader = dcp.HuggingFaceStorageReader(args.source) if args.safetensors else None
    dcp.load(model.state_dict(), checkpoint_id=args.source, storage_reader=reader)
    run.print("LOADED")
for _ in run.epochs(args.epochs):
    for x, y in batches:
        run.backward(nn.functional.mse_loss(model(x), y))
        run.update(optimizer)
        run.step()
dcp.save(model.state_dict(), checkpoint_id=run.folder.path / "dcp")
run.finish()
