"""A loop of one's own whose loss is a replicated DTensor, as tensor parallel losses are."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from hpc_ddp.integrations import StopPoint

stop = StopPoint(save_every=None)
device = torch.accelerator.current_accelerator(check_available=True)
kind = device.type if device else "cpu"
if device:
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
mesh = init_device_mesh(kind, (2,))
for _ in range(3):
    loss = torch.full((), 3.0, device=kind, requires_grad=True)
    stop.step(loss=distribute_tensor(loss, mesh, [Replicate()]))
stop.finish()
dist.destroy_process_group()
