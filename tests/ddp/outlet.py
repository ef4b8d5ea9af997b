"""Export of a model that takes more than half of the stand-in device's memory."""

import torch
from sim import backend
from torch import nn

from hpc_ddp.training import start

run = start()
model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 256)).to(run.device)
weights = sum(tensor.nbytes for tensor in model.state_dict().values())
backend.C.set_limit(run.device.index, backend.C.bytes_held(run.device.index) + weights // 2)
folder = run.export(model, torch.randn(2, 256, device=run.device))
run.finish()
exported = torch.export.load(folder / "model.pt2").module()
example = torch.randn(3, 256)
model.eval()
torch.testing.assert_close(exported(example), model.cpu()(example))
print("EXPORTED", flush=True)
