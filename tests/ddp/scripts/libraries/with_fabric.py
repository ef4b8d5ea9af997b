"""A loop with Lightning Fabric."""

import os

import lightning as L
import torch
from common import OPTIONS, args, disturb, leave_weights

from hpc_ddp.integrations import StopPoint

stop = StopPoint(**OPTIONS)
fabric = L.Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
fabric.launch()
torch.manual_seed(1)
net = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
state = {"model": model, "optimizer": optimizer}
if folder := stop.latest():
    fabric.load(folder / "state.ckpt", state)
for step in range(stop.position.step, args.steps):
    disturb(step + 1)
    seed = 2 * step + fabric.global_rank
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
    if stop.step(total_steps=args.steps, loss=loss):
        with stop.checkpoint() as folder:
            fabric.save(folder / "state.ckpt", state)
stop.finish()
leave_weights(net)
