"""A plain loop with torch.distributed.checkpoint; the state of DDP and Adam."""

import os
from typing import Any

import torch
import torch.distributed as dist
from common import OPTIONS, RANK, args, disturb, leave_weights
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from hpc_ddp.integrations import StopPoint

dcp: Any = checkpoint  # it has no types

stop = StopPoint(**OPTIONS)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(1)
net = torch.nn.Linear(4, 1)
model = DistributedDataParallel(net) if "RANK" in os.environ else net
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
if folder := stop.latest():
    weights, moments = get_state_dict(model, optimizer)
    state: Any = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
for step in range(stop.position.step, args.steps):
    disturb(step + 1)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + RANK))
    loss: Any = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if stop.step(total_steps=args.steps, samples=8, loss=loss):
        weights, moments = get_state_dict(model, optimizer)
        with stop.checkpoint() as folder:
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
stop.finish()
leave_weights(net)
