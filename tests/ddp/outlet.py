"""Export of a model that takes more than half of the stand-in device's memory."""

import sys
from typing import Any

import torch
from torch import nn

from hpc_ddp.training import start

C: Any = sys.modules["sim.backend"].C
run = start()
model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 256)).to(run.device)
weights = sum(tensor.nbytes for tensor in model.state_dict().values())
C.set_limit(run.device.index, C.bytes_held(run.device.index) + weights // 2)
folder = run.export(model, torch.randn(2, 256, device=run.device))
run.finish()
exported = torch.export.load(folder / "model.pt2").module()
example = torch.randn(3, 256)
model.eval()
torch.testing.assert_close(exported(example), model.cpu()(example))
print("EXPORTED", flush=True)
