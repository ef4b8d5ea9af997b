"""Trains from pretrained weights, and uses the helpers for loops of one's own."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hpc_ddp.training import start

run = start(seed=0)
cache = Path("cache")
lines: list[dict[str, Any]] = []
with run.rank_0_first():
    print(f"CACHE {run.rank} {cache.exists()}", flush=True)
    cache.touch()
net = torch.nn.Linear(4, 1, bias=False)
model = run.wrap(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
if not run.resumed:
    torch.nn.init.constant_(net.weight, 7.0)
run.print("BEGIN", run.resumed, net.weight.mean().item())
run.on_metrics(lambda step, metrics: lines.append({"step": step, **metrics}))
for step in run.steps(40):
    if "--stop" in sys.argv and not run.resumed:
        time.sleep(0.05)  # the notice is taken up beside the loop
    if "--stop" in sys.argv and not run.resumed and step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4) * (run.rank + 1)).mean()
    run.backward(loss)
    optimizer.step()
    run.barrier()
    with run.untimed():
        run.print("LOSSES", max(run.gather(loss.item())) == run.gather(loss.item())[-1])
    run.step(loss=loss)
run.finish()
if run.rank == 0:
    print("LAST", lines[-1]["step"], isinstance(lines[-1]["loss"], float))
    (run.folder.path / "weights").write_bytes(net.weight.detach().cpu().numpy().tobytes())
