"""Measures the messages between ranks: one Gloo group of all beside the tree of small groups.

``python bench/scale/control.py [RANKS …]`` (16 64 128 512) forks so many ranks from one process
that has imported torch, lets each make the two controls of a run, and prints the connections of the
rank that has most, the seconds until all have made them, and the median of an agreement on a stop.
Above 128 ranks only the tree is played. Idle threads of Gloo look for messages less often
(patient_epoll.c; needs gcc).

All ranks share this machine's cores, so an agreement takes at least the processor time of all ranks
in it, divided by the cores. With the time of its hops in a row (`hops_of`), each as slow as the
slowest hundredth that hops.py has measured under load, this is the formula for any number of ranks;
on a cluster, where each node has cores of its own, the first part is that of one node. The share of
a rank is measured with the fewest ranks, and the formula is printed beside each measurement.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hops import hops_of
from patient_epoll import preload_patient_epoll
from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers its backend

from hpc_ddp.training.process.control_tree import TreeControl
from hpc_ddp.training.process.environment import DistEnv
from hpc_ddp.training.process.rank_messages import Control

ROUNDS = 50
MOST_IN_ONE_GROUP = 128
HOP_S = 0.00423  # at p99, beside busy loops: bench/results/2026-11-26-ranks.md
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
    count = 0
    for name in ("tcp", "tcp6"):  # line by line: with many ranks the table has megabytes
        with open(f"/proc/self/net/{name}") as table:
            next(table)
            for line in table:
                row = line.split()
                count += row[3] == "01" and row[9] in inodes  # 01: established
    return count


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
    used = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(ROUNDS):
        began = time.monotonic()
        controls[0].start_max(torch.zeros(4, dtype=torch.int64)).wait()
        seconds.append(time.monotonic() - began)
    end = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = (end.ru_utime + end.ru_stime - used.ru_utime - used.ru_stime) / ROUNDS
    controls[0].barrier()
    agreed_s = statistics.median(seconds)
    return {"connections": count, "made_s": made_s, "agreed_s": agreed_s, "cpu_s": cpu_s}


def measure(kind: type[Control], ranks: int) -> dict[str, float]:
    """Fork the ranks; return the largest of each figure, and the mean of ``cpu_s``."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    reader, writer = os.pipe()
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, all objects in each rank
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
    largest = {name: max(figure[name] for figure in figures) for name in figures[0]}
    return largest | {"cpu_s": statistics.fmean(figure["cpu_s"] for figure in figures)}


def main() -> None:
    """Print the table."""
    preload_patient_epoll()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    print("| ranks | way | connections of a rank, at most | made in | agreement, median |", end="")
    print(" CPU time of a rank | by the formula | measured / formula |")
    print("|---|---|---|---|---|---|---|---|")
    shares: dict[str, float] = {}  # CPU time of a rank in an agreement, with the fewest ranks
    for ranks in [int(word) for word in sys.argv[1:]] or [16, 64, 128, 512]:
        for name, kind in (("one group", Control), ("tree", TreeControl)):
            if kind is Control and ranks > MOST_IN_ONE_GROUP:
                continue
            figures = measure(kind, ranks)
            share = shares.setdefault(name, figures["cpu_s"])
            formula_s = ranks * share / (os.cpu_count() or 1) + hops_of(ranks) * HOP_S
            print(
                f"| {ranks} | {name} | {figures['connections']:.0f} | {figures['made_s']:.1f} s |"
                f" {1000 * figures['agreed_s']:.1f} ms | {1000 * figures['cpu_s']:.2f} ms |"
                f" {1000 * formula_s:.1f} ms | {figures['agreed_s'] / formula_s:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
