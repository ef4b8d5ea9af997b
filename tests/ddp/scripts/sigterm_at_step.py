"""Run a script that gets a SIGTERM in a given step: ``sigterm_at_step.py STEP SCRIPT [ARGS…]``.

Its steps are slowed down, so that the stop follows within a few of them. Without a signal, STEP is
-1. A GPU computes the same bits again only where it is told to.
"""

import os
import runpy
import signal
import sys
import time
from functools import partial
from typing import Any
from unittest import mock

import torch

import hpc_ddp.training
from hpc_ddp.training import Run

at, sys.argv = int(sys.argv[1]), sys.argv[2:]
step = Run.step


def signalled_step(run: Run, **values: Any) -> None:
    if run.position.step + 1 == at:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.03 if at > 0 else 0.0)
    step(run, **values)


if torch.cuda.is_available():
    hpc_ddp.training.start = partial(hpc_ddp.training.start, deterministic=True)
with mock.patch.object(Run, "step", signalled_step):
    runpy.run_path(sys.argv[0], run_name="__main__")
