"""Workers with two devices each; they print which ones, and what each device draws first."""

from __future__ import annotations

import json
import sys

import torch

from hpc_ddp.training import start

run = start(int(sys.argv[1]), devices_per_worker=2)
drawn = [torch.rand(2, device=device).tolist() for device in run.devices]
current = torch.accelerator.current_device_index()
print(json.dumps({"devices": [d.index for d in run.devices], "current": current, "drawn": drawn}))
run.finish()
