"""Prints where the ranks are, in their order, and what an MPI has told them."""

import os

import torch.distributed as dist

dist.init_process_group("gloo")
mine = (os.environ["SLURMD_NODENAME"], os.environ.get("PMIX_RANK"), os.environ["LOCAL_RANK"])
everywhere = [mine] * dist.get_world_size()
dist.all_gather_object(everywhere, mine)
if dist.get_rank() == 0:
    print("ranks on", *(node for node, _, local_rank in everywhere if local_rank == "0"))
    print("PMIX_RANK", *(rank for _, rank, _ in everywhere), flush=True)
dist.destroy_process_group()
