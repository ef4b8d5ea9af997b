"""Prints its arguments; uses nothing of hpc-ddp, nor torch, whose import takes seconds."""

import json
import os
import sys
import time
from pathlib import Path

if os.environ["RANK"] == "0":
    print(json.dumps({"argv": sys.argv, "host": os.uname().nodename}), flush=True)
# All ranks together, so that a view of all ranks shows their equal lines as one: a busy machine may
# start them seconds apart.
folder = Path(os.environ["HPC_DDP_RUN"])
(folder / f"rank-{os.environ['RANK']}-is-done").touch()
while len(list(folder.glob("rank-*-is-done"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
print("done", flush=True)
