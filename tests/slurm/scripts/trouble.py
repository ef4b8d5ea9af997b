"""Trains a little and gets into the kind of trouble that its argument names."""

import os
import sys
import time
from typing import Any

import torch

from hpc_ddp.training import start


class SlowState:
    """Makes a save last long enough to be met in it."""

    def state_dict(self) -> dict[str, Any]:
        if trouble == "slow-save":
            open(os.path.join(os.environ["HPC_DDP_RUN"], f"saving-{run.rank}"), "w").close()
            time.sleep(6)
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


trouble = sys.argv[1]
if trouble == "slow-start":
    time.sleep(30)
run = start(save_every=None, save_every_steps=50 if trouble == "slow-save" else 20)
last = run.world_size - 1
if trouble == "exit-before" and run.rank == last:
    sys.exit(3)
if trouble == "raise-before" and run.rank == last:
    raise ValueError("before the first step")
model = run.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
samples = torch.randn(int(os.environ.get("SAMPLES", "4000")), 4)
batches = run.loader(torch.utils.data.TensorDataset(samples), batch_size=5)
run.track(model=model, optimizer=optimizer, slow=SlowState())
for _ in run.epochs(1):
    for (x,) in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        run.backward(loss)
        optimizer.step()
        run.step(loss=loss)
        time.sleep(0.02)
        if trouble == "raise-at-30" and run.position.step == 30 and run.rank == last:
            raise ValueError("at step 30")
        if trouble == "eat-at-30" and run.position.step == 30 and run.rank == 1:
            eaten = []
            while True:
                eaten.append(torch.ones(1 << 22))
run.finish()
