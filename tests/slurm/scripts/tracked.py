"""Saves a checkpoint of its own after each step, and records each step: argument wandb or mlflow.

It knows nothing of hpc-ddp. At steps 4 and 8 rank 0 stands still until somebody ends it.
"""

import os
import sys
import time
from pathlib import Path

rank, tracker = int(os.environ["RANK"]), sys.argv[1]
checkpoint = Path(f"step-{rank}")

if tracker == "wandb":
    import wandb

    recording = wandb.init(project="tests")  # each rank has a run of its own

    def record(step: int) -> None:
        recording.log({"loss": 1 / step}, step=step, commit=True)

else:
    import mlflow

    print("RUN", os.environ.get("MLFLOW_RUN_ID"), flush=True)
    if rank == 0:
        mlflow.start_run()

    def record(step: int) -> None:
        if rank == 0:
            mlflow.log_metric("loss", 1 / step, step=step)


first = int(checkpoint.read_text()) + 1 if checkpoint.exists() else 1
for step in range(first, 13):
    record(step)
    draft = Path(f"draft-{rank}")
    draft.write_text(str(step))
    draft.rename(checkpoint)
    if step in (4, 8) and rank == 0:
        print("STANDS AT", step, flush=True)
        time.sleep(600)
print("done", flush=True)
