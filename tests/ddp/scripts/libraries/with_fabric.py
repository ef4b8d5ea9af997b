"""A loop with Lightning Fabric: dropout, shuffled data with noise, and a scheduler of epochs."""

import os
from typing import Any

import lightning as L
import torch
from common import KIND, OPTIONS, args, disturb, leave_weights
from lightning.fabric.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from hpc_ddp.integrations.fabric import Stop


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return index / 64 + 0.1 * torch.randn(4)


# A scale that grows until a gradient overflows, and a step is skipped.
scaler = torch.amp.GradScaler(KIND, growth_interval=2)
half: Any = [MixedPrecision("16-mixed", KIND, scaler)]
local = int(os.environ["LOCAL_WORLD_SIZE"])
fabric = L.Fabric(
    accelerator=KIND,
    strategy="ddp",
    devices=local,
    num_nodes=int(os.environ["WORLD_SIZE"]) // local,
    plugins=half if args.part == "half" else None,
)
stop = Stop(fabric, **OPTIONS)
fabric.launch()
torch.manual_seed(1)
net = torch.nn.Sequential(
    torch.nn.Linear(4, args.width),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(args.width, args.width),
    torch.nn.Linear(args.width, 1),
)
model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
shuffled = DataLoader(Noisy(), batch_size=4, shuffle=True)
if args.order == "sampler":
    sampler = WeightedRandomSampler([1.0] * 64, 64, generator=torch.Generator().manual_seed(5))
    shuffled = DataLoader(Noisy(), batch_size=4, sampler=sampler)
loader = fabric.setup_dataloaders(shuffled)
stop.load(model=model, optimizer=optimizer, scheduler=scheduler)
torch.manual_seed(fabric.global_rank + stop.position.step)  # a resume restores each rank's numbers
for epoch in range(stop.position.epoch, args.epochs):
    for x in stop.batches(loader, epoch):
        disturb(stop.position.step + 1)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        stop.save(loss=loss, total_steps=args.epochs * len(loader))
    scheduler.step()
stop.finish()
leave_weights(net)
