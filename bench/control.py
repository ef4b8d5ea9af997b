"""Measures the messages between ranks: one Gloo group of all beside the tree of small groups.

``python bench/control.py [RANKS …]`` (16 64 128) forks so many ranks from one process that has
imported torch, lets each make the two controls of a run, and prints the connections of the rank
that has most, the seconds until all have made them, and the median of an agreement on a stop. All
ranks share this machine's cores, so the times compare the two ways and say nothing of a cluster.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers its backend

from hpc_ddp.training.process.control import Control
from hpc_ddp.training.process.control_tree import TreeControl
from hpc_ddp.training.process.environment import DistEnv

ROUNDS = 50
TIMEOUT = timedelta(seconds=600)


def connections() -> int:
    """Return the number of this process's TCP connections."""
    inodes = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(row[3] == "01" and row[9] in inodes for row in rows)  # 01: established


def work(kind: type[Control], rank: int, ranks: int, port: int) -> dict[str, Any]:
    """Be one rank; return the figures."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    # The default group of a real job is NCCL's; this one connects to nothing.
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    before = connections()
    began = time.monotonic()
    info = DistEnv(rank, rank, ranks, ranks, launched=True)
    controls = [kind(info, TIMEOUT) for _ in range(2)]
    controls[0].barrier()
    made_s = time.monotonic() - began
    count = connections() - before
    seconds = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        controls[0].start_max(torch.zeros(4, dtype=torch.int64)).wait()
        seconds.append(time.monotonic() - began)
    controls[0].barrier()
    return {"connections": count, "made_s": made_s, "agreed_s": statistics.median(seconds)}


def measure(kind: type[Control], ranks: int) -> dict[str, float]:
    """Fork the ranks; return the largest of each figure."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    reader, writer = os.pipe()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            os.write(writer, json.dumps(work(kind, rank, ranks, port)).encode() + b"\n")
            os._exit(0)
        pids.append(pid)
    # After the forks: a process that has threads, as the store's, is not to be forked.
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    os.close(writer)
    with os.fdopen(reader) as lines:
        figures = [json.loads(line) for line in lines]
    for pid in pids:
        os.waitpid(pid, 0)
    del store
    assert len(figures) == ranks, f"{ranks - len(figures)} of {ranks} ranks have failed"
    return {name: max(figure[name] for figure in figures) for name in figures[0]}


def main() -> None:
    """Print the table."""
    print("| ranks | way | connections of a rank, at most | made in | agreement, median |")
    print("|---|---|---|---|---|")
    for ranks in [int(word) for word in sys.argv[1:]] or [16, 64, 128]:
        for name, kind in (("one group", Control), ("tree", TreeControl)):
            figures = measure(kind, ranks)
            print(
                f"| {ranks} | {name} | {figures['connections']:.0f} | {figures['made_s']:.1f} s |"
                f" {1000 * figures['agreed_s']:.1f} ms |",
                flush=True,
            )


if __name__ == "__main__":
    main()
