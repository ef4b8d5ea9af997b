"""A script for `srun python`, as Slurm sites show it; knows nothing of hpc-ddp or torchrun.

procid_script.py FOLDER [seconds a step]
"""

import os
import sys
import time

import torch
import torch.distributed as dist

FOLDER, PAUSE_S = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
STEPS = 80
rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
local_rank, node = int(os.environ["SLURM_LOCALID"]), int(os.environ["SLURM_NODEID"])
per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
assert rank == node * per_node + local_rank, "the tasks are not dealt out in blocks"
dist.init_process_group("gloo", rank=rank, world_size=world_size)

snapshot = os.path.join(FOLDER, "snapshot.pt")
step = torch.load(snapshot)["step"] if os.path.exists(snapshot) else 0
if step and rank == 0:
    print(f"going on from step {step}", flush=True)
while step < STEPS:
    time.sleep(PAUSE_S)
    count = torch.ones(1)
    dist.all_reduce(count)
    assert int(count) == world_size
    step += 1
    if rank == 0 and step % 20 == 0:
        print(f"step {step} of {STEPS}", flush=True)
    if rank == 0 and step % 5 == 0:
        torch.save({"step": step}, snapshot + ".new")
        os.replace(snapshot + ".new", snapshot)
if rank == 0:
    print(f"done at step {step} with {world_size} ranks, {per_node} on each node", flush=True)
dist.destroy_process_group()
