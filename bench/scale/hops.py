"""The time of a message between two nodes, as the ranks' agreements send it, and what follows.

``python bench/scale/hops.py`` puts two ranks into network namespaces of their own, joined by a veth
pair. They pass a small tensor there and back in a Gloo group (a broadcast from either), idle and
beside busy loops, one for each core. An agreement of W ranks is a reduce up and a broadcast down a
tree of groups of 16, and within a group Gloo's are binomial trees: hops in a row as `hops_of` says.
The largest W that is measured here has 32 ranks, all on this machine. Needs root.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped

from hpc_ddp.training.process.control_tree import FANOUT

ROUNDS = 2000
NAMES = "hd-hop-0", "hd-hop-1"
ADDRESSES = "10.213.77.1", "10.213.77.2"


def hops_of(ranks: int) -> int:
    """Return the messages in a row of an agreement of so many ranks."""
    hops = 0
    while ranks > 1:
        hops += math.ceil(math.log2(min(ranks, FANOUT)))
        ranks = -(-ranks // FANOUT)
    return 2 * hops


def pass_messages(rank: int) -> None:
    """Be one of the two ranks; rank 0 prints the times of one hop in ms, as JSON."""
    torch.set_num_threads(1)
    store = TCPStore(ADDRESSES[0], 29555, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    numbers, times = torch.zeros(4, dtype=torch.int64), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        dist.broadcast(numbers, 0)
        dist.broadcast(numbers, 1)
        times.append(1000 * (time.perf_counter() - began) / 2)
    dist.barrier()
    if rank == 0:
        print(json.dumps(sorted(times[100:])))


def measure(busy: int) -> list[float]:
    """Return the sorted times of a hop beside so many busy loops, in ms."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, str(rank)],
                stdout=subprocess.PIPE,
                env={**os.environ, "GLOO_SOCKET_IFNAME": f"hop{rank}"},
            )
            for rank, name in enumerate(NAMES)
        ]
        output, _ = ranks[0].communicate(timeout=300)
        ranks[1].communicate(timeout=60)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    times: list[float] = json.loads(output)
    return times


def main() -> None:
    """Join two namespaces, and print the table."""
    lines = [f"netns add {name}" for name in NAMES]
    lines += [f"link add hop0 netns {NAMES[0]} type veth peer name hop1 netns {NAMES[1]}"]
    for rank, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
        lines += [f"-n {name} addr add {address}/30 dev hop{rank}"]
        lines += [f"-n {name} link set {device} up" for device in ("lo", f"hop{rank}")]
    cores = os.cpu_count() or 1
    try:
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True)
        rows = {"idle": measure(0), f"beside {cores} busy loops": measure(cores)}
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)
    sizes = 16, 512, 8192
    heads = (f"{n} ranks, {hops_of(n)} hops at p99 |" for n in sizes)
    print("| | hop, median | hop, p99 |", *heads)
    print("|---|---|---|" + "---|" * len(sizes))
    for name, times in rows.items():
        p99 = times[int(0.99 * len(times))]
        agreements = (f"{hops_of(n) * p99:.1f} ms |" for n in sizes)
        print(f"| {name} | {times[len(times) // 2]:.2f} ms | {p99:.2f} ms |", *agreements)


if __name__ == "__main__":
    if sys.argv[1:]:
        pass_messages(int(sys.argv[1]))
    else:
        main()
