"""All messages of a control, over groups of --fanout ranks: RANK, and what has come."""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_ddp.training.process import control_tree
from hpc_ddp.training.process.environment import DistEnv

parser = argparse.ArgumentParser()
parser.add_argument("--fanout", type=int, required=True)
control_tree.FANOUT = control_tree.MOST_IN_ONE_GROUP = parser.parse_args().fanout

dist.init_process_group("gloo")
info = DistEnv.from_env()
rank, count = info.rank, info.world_size
both = [control_tree.open_control(info, timedelta(seconds=600)) for _ in range(2)]
for control in both:  # one for each thread, as in a run
    is_tree = isinstance(control, control_tree.TreeControl)
    assert is_tree is (count > control_tree.FANOUT)
    if not is_tree:  # as torch binds it to the GPU of a run; a tensor there would raise here
        control._group.bound_device_id = torch.device("xpu:0")
    largest = torch.tensor([rank, -rank, 7])
    work = control.start_max(largest)
    rows, gathering = control.start_gather(torch.tensor([float(rank), 0.5]))
    total = torch.tensor([2.0**rank], dtype=torch.float64)
    control.sum(total)  # waits for the two that were begun before it
    work.wait()
    gathering.wait()
    control.barrier()
    assert largest.tolist() == [count - 1, 0, 7]
    assert [row.tolist() for row in rows] == [
        [float(peer), 0.5] for peer in range(count if rank == 0 else 0)
    ]
    assert total.item() == 2.0**count - 1
    assert control.to_first({"rank": rank}) == [
        {"rank": peer} for peer in range(count if rank == 0 else 0)
    ]
    assert control.from_first(f"from {rank}") == "from 0"
connections = sum(len(level.ranks) - 1 for level in getattr(both[0], "_levels", []))
print("RANK", rank, connections)
dist.destroy_process_group()
