"""Records the metrics of a run of hpc-ddp by its hook: argument wandb or mlflow.

It saves every third step. In the first two starts it stands still once, at steps 5 and 8.
"""

import os
import sys
import time
from pathlib import Path

import torch

from hpc_ddp.training import start
from hpc_ddp.training.telemetry import metrics

metrics.EVERY_S = metrics.SELDOM_S = 0.0  # each step is a line of the journal
run = start(seed=0, save_every_steps=3)
model = run.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
if run.rank == 0 and sys.argv[1] == "wandb":
    import wandb

    wandb.init(project="tests")
    run.on_metrics(lambda step, metrics: wandb.log(metrics, step=step, commit=True))
elif run.rank == 0:
    import mlflow

    mlflow.start_run()
    run.on_metrics(lambda step, metrics: mlflow.log_metrics(metrics, step=step))
stop_at = {"0": 5, "1": 8}.get(os.environ["HPC_DDP_ATTEMPT"])
for _ in run.steps(80):  # the ranks agree on a stop within 20, if each takes 50 ms
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).mean()
    run.backward(loss)
    optimizer.step()
    time.sleep(0.05)  # more than the pause between two lines
    run.step(loss=loss)
    if run.position.step == stop_at:
        print("STANDS AT", stop_at, flush=True)
        while not Path(os.environ["HPC_DDP_NOTICE"]).exists():
            time.sleep(0.05)
run.finish()
