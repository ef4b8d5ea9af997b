"""Imports a package of its argument within a function, before its first step; attempt 0 fails."""

import importlib
import os
import sys

print("imported ahead:", sys.argv[1] in sys.modules, flush=True)

from hpc_ddp.training import start  # noqa: E402

run = start(save_every=None, save_every_steps=1)
importlib.import_module(sys.argv[1])
run.track()
for _ in run.steps(3):
    run.step()
    if run.position.step == 2 and os.environ["HPC_DDP_ATTEMPT"] == "0":
        sys.exit(1)
run.finish()
