"""A model that the script itself shards over meshes of its own, without start(tp=)."""

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hpc_ddp.training import start

way, total = sys.argv[1], int(sys.argv[2])
run = start(save_every_steps=3)
kind = run.device.type
model = nn.Linear(8, 4, device=run.device)
sharded: torch.Tensor
if way == "grid":  # "dp" holds copies
    mesh = init_device_mesh(kind, (run.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    sharded = distribute_tensor(model.weight, mesh["tp"], [Shard(1)])
elif way == "both":
    mesh = init_device_mesh(kind, (run.world_size // 2, 2), mesh_dim_names=("any", "name"))
    sharded = distribute_tensor(model.weight, mesh, [Replicate(), Shard(0)])
else:  # on half of the ranks
    mesh = DeviceMesh(kind, [0, 1])
    on_mesh = run.rank < 2
    sharded = distribute_tensor(model.weight, mesh, [Shard(0)]) if on_mesh else model.weight
model.weight = nn.Parameter(sharded)
run.track(model=model)
for _ in run.epochs(1):
    while run.position.step < total:
        with torch.no_grad():
            model.weight.add_(1.0)
        run.step()
weight: Any = model.weight
run.print("SUM", round(weight.full_tensor().sum().item(), 3))
run.finish()
