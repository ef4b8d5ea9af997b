"""The weights that test_export.py has written, used where hpc-ddp is not installed.

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
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)).eval()
model.load_state_dict(load_file(f"{folder}/model.safetensors"))
torch.testing.assert_close(model(x), expected)
print("THE SAME")
