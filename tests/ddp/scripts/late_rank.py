"""A rank has work of its own before it finishes, for longer than a teardown may take."""

import sys
import time
from pathlib import Path

import torch

from hpc_ddp.training import start
from hpc_ddp.training.process import process_group

run = start(seed=0, save_every_steps=1)  # so that nothing is left to save, where ranks would meet
TEARDOWN_S = 0.1 if run.device.type == "cpu" else 3.0  # NCCL's takes a while
vars(process_group)["TEARDOWN_S"] = TEARDOWN_S
model = run.wrap(torch.nn.Linear(4, 1))
run.track(model=model)
for _ in run.steps(2):
    run.step()
drawn = Path("drawn")
if run.rank == int(sys.argv[1]):
    time.sleep(TEARDOWN_S + 0.9)
    drawn.touch()
    print("FINISHED" if run.folder.finished() else "UNFINISHED", flush=True)
run.finish()
print("DRAWN" if drawn.exists() else "TOO EARLY", flush=True)
