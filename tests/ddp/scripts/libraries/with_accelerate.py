"""An Accelerate loop with dropout, shuffled data and a scheduler."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from common import KIND, OPTIONS, args, disturb, leave_weights
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from hpc_ddp.integrations.accelerate import Stop


class Neighbours(Sampler[list[int]]):
    """Batches of four neighbours, in the order of Python's random numbers."""

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[list[int]]:
        firsts = [*range(0, 64, 4)]
        random.shuffle(firsts)
        yield from (list(range(first, first + 4)) for first in firsts)


class Buckets(Neighbours):
    """Batches of a size that Accelerate can ask for."""

    batch_size, drop_last = 4, False


class Stream(IterableDataset[tuple[torch.Tensor]]):
    """The rows of a data set, in turn."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        yield from (data[index] for index in range(len(data)))


dispatches = {"dispatch": True, "dispatch-odd": True, "stream": False}.get(args.order)
settings = DataLoaderConfiguration(
    dispatch_batches=dispatches, even_batches=args.order != "neighbours"
)
accelerator = Accelerator(cpu=KIND == "cpu", dataloader_config=settings)
stop = Stop(accelerator, **OPTIONS)
set_seed(1)
model = torch.nn.Sequential(
    torch.nn.Linear(4, args.width),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(args.width, args.width),
    torch.nn.Linear(args.width, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
data = TensorDataset(torch.randn(63 if args.order.endswith("-odd") else 64, 4))
loader: Any
if args.order == "sampler":
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
elif args.order == "buckets":
    loader = DataLoader(data, batch_sampler=Buckets())
elif args.order == "neighbours":
    loader = DataLoader(data, batch_sampler=Neighbours())
elif args.order == "stream":
    loader = DataLoader(Stream(), batch_size=4)
else:
    loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
total_steps = args.epochs * (8 if args.order == "stream" else len(loader))
if args.part != "loose":
    scheduler = accelerator.prepare(scheduler)
stop.load(model)
if args.part == "late":
    accelerator.register_for_checkpointing(torch.optim.lr_scheduler.ExponentialLR(optimizer, 1))
samples = 0
for epoch in range(stop.position.epoch, args.epochs):
    for (x,) in stop.batches(loader, epoch):
        disturb(stop.position.step + 1)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        samples = len(accelerator.gather_for_metrics(x))
        stop.save(loss=loss, total_steps=total_steps)
    print(f"epoch {epoch} ends with {samples} samples")
stop.finish()
leave_weights(accelerator.unwrap_model(model))
accelerator.end_training()
