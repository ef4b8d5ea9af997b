"""Sums of tensors that a stream of the script's own computes, and another thread reads."""

import threading

import torch

from hpc_ddp.training import start
from hpc_ddp.training.checkpoint.rank_comparison import start_checksums

run = start(save_every=None)
numbers = torch.arange(1 << 16, dtype=torch.int64)
lines: list[int] = []
with torch.Stream(run.device):
    tensor = numbers.to(run.device) * 2
    wait = start_checksums({"numbers": tensor})
thread = threading.Thread(target=lambda: lines.append(wait()["numbers"]))
thread.start()
thread.join()
print("EQUAL", lines == [2 * int(numbers.sum())])
run.finish()
