"""What has left a run in test_export.py, used where hpc-ddp is not installed.

A script for any Python; a fork of the tests' process has to forget what it knows first.
"""

import sys

import torch
from safetensors.torch import load_file
from torch import nn

for name in [name for name in sys.modules if name.partition(".")[0] == "hpc_ddp"]:
    del sys.modules[name]
sys.modules["hpc_ddp"] = None  # type: ignore[assignment]  # an import fails

folder = sys.argv[1]
x, expected = torch.load(f"{folder}/expected.pt")
program = torch.export.load(f"{folder}/export/model.pt2").module()
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)).eval()
model.load_state_dict(load_file(f"{folder}/export/model.safetensors"))
for n in (1, 7, 64):
    torch.testing.assert_close(program(x[:n]), expected[:n])
    torch.testing.assert_close(model(x[:n]), expected[:n])
print("THE SAME")
