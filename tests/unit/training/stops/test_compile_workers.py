"""The workers of torch's compiler, and a signal to every process of a step."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The device "meta" is no CPU, and needs no driver.
SCRIPT = """
import operator, os, signal, time
import torch
from torch._inductor.async_compile import AsyncCompile
from hpc_ddp.training.stops.loader_workers import outlive_notices

signal.signal(signal.SIGTERM, lambda number, frame: print("notice", flush=True))
outlive_notices([torch.nn.Linear(2, 2)])
assert not AsyncCompile.process_pool.cache_info().currsize
model = torch.nn.Linear(2, 2, device="meta")
model.compile()
outlive_notices([3, torch.nn.Sequential(model)])
pool = AsyncCompile.process_pool()
assert pool.submit(operator.add, 1, 2).result(60) == 3
job = pool.submit(time.sleep, 2)
for process in (os.getpid(), pool.process.pid):
    os.kill(process, signal.SIGTERM)
print(job.result(20), pool.submit(operator.add, 1, 2).result(20), time.monotonic(), flush=True)
"""


@pytest.mark.more
def test_a_compilation_outlives_a_signal_of_the_cluster() -> None:
    """And the end of the process waits for no worker that is deaf to torch's SIGTERM."""
    script = f"{SCRIPT}import atexit; atexit._run_exitfuncs(); print(time.monotonic())"
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 0, run.stderr
    notice, results, ended = run.stdout.splitlines()
    assert (notice, results.split()[:2]) == ("notice", ["None", "3"])
    assert float(ended) - float(results.split()[2]) < 5
    assert "unclean" not in run.stderr
