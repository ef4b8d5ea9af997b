"""Uses nothing of hpc-ddp. Prints its arguments, then reduces until TICKS seconds are over."""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

if "DEAF" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print(json.dumps({"argv": sys.argv, "host": os.uname().nodename}), flush=True)
ticks = float(os.environ.get("TICKS", "0"))
marker = os.environ.get("MARKER")  # where it is found to exist, an earlier attempt was here
if marker and os.path.exists(marker):
    ticks = 0
dist.barrier()
if marker:
    open(marker, "w").close()
end = time.time() + ticks
while time.time() < end:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
print("done", flush=True)
dist.destroy_process_group()
