"""Prints each rank's buffers inside of `run.evaluating`, and how often entering has waited."""

import argparse
import json
import sys
from typing import Any

import torch
from torch import nn

from hpc_ddp.training import start

parser = argparse.ArgumentParser()
parser.add_argument("--pp", type=int, default=1)
parser.add_argument("--elsewhere", action="store_true", help="a buffer stays on the CPU")
args = parser.parse_args()
TYPES = (torch.float32, torch.int64, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.bool)

run = start(save_every=None, pp=args.pp)
stage = nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(8)))
for number, dtype in enumerate(TYPES):
    stage.register_buffer(f"value{number}", torch.tensor(float(run.rank)).to(dtype))
stage.register_buffer("rows", torch.full((2, 3), run.rank).t())
stage.register_buffer("empty", torch.zeros(0))
stage.register_buffer("own", torch.tensor(run.rank), persistent=False)
model = run.wrap(stage, broadcast_buffers=False, init_sync=False)
if args.elsewhere:
    stage.register_buffer("elsewhere", torch.full((2,), float(run.rank)))
stage.get_buffer("7.running_mean").fill_(run.rank)
names = [*(f"value{number}" for number in range(len(TYPES))), "rows", "7.running_mean"]
names += ["elsewhere"] if args.elsewhere else []
C: Any = sys.modules["sim.backend"].C if run.device.type == "sim" else None
before = C.waits() if C else 0
with run.evaluating(model):
    waits = C.waits() - before if C else 0
    buffers = {name: stage.get_buffer(name) for name in [*names, "own"]}
    values = {
        name: sorted(set(buffer.float().flatten().tolist())) for name, buffer in buffers.items()
    }
    places = {name: buffer.device.type for name, buffer in buffers.items()}
    print(json.dumps({"rank": run.rank, "values": values, "places": places, "waits": waits}))
run.finish()
