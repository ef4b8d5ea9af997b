"""The part of a preflight that needs torch: its import, and the speed of an all-reduce.

``python <run>/lib/node.py bandwidth``, one process per node, started by `checks`.

An all-reduce is as slow as its slowest link, on every node alike, so it names nobody. Before it,
each node therefore sends to several others in turn, and they to it: whoever is slow with all of
them is the one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

from hpc_ddp.core.accelerators import usable
from hpc_ddp.node.checks import tell
from hpc_ddp.node.worker import die_with_parent

ROUNDS = 4  # how many others each node is measured with, at most
TIMEOUT_S = 20.0
FIRST_BYTES, LAST_BYTES = 1 << 20, 16 << 20
BURST_S, ENOUGH_S, SAMPLES = 0.2, 3.0, 6  # one direction: so long, with so many samples if it can
REDUCED = 4 << 20  # elements of the all-reduce, 16 MiB


def partner(rank: int, world: int, turn: int) -> int | None:
    """Return whom a rank meets in a turn of a round-robin tournament, None if nobody.

    Over the turns from 0 to `world` - 2 (one more for an odd `world`) everybody meets everybody
    else once.
    """
    even = world + world % 2
    last = even - 1
    if rank == last:
        peer = next(peer for peer in range(last) if 2 * peer % last == turn % last)
    else:
        peer = (turn - rank) % last
        peer = last if peer == rank else peer
    return peer if peer < world else None


def turns(world: int) -> int:
    return min(ROUNDS, world - 1 + world % 2)


class Meter:
    """Measures the ways between the members of a process group; torch is given to it."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch, self._dist = torch, torch.distributed
        self._device = device
        self._payload = self._zeros(LAST_BYTES // 4)
        self._word = self._zeros(1)

    def _zeros(self, count: int) -> Any:
        return self._torch.zeros(count, dtype=self._torch.float32, device=self._device)

    def _move(self, operation: Any, tensor: Any, peer: int) -> None:
        """Send or receive, and wait until it is done."""
        dist = self._dist
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
            work.wait()
        if self._device != "cpu":
            self._torch.accelerator.synchronize()

    def send(self, peer: int) -> float:
        """Send more and more; return the best speed, in MB/s: what disturbs only slows down."""
        dist = self._dist
        size, best, spent, count = FIRST_BYTES, 0.0, 0.0, 0
        while spent < BURST_S or (count < SAMPLES and spent < ENOUGH_S):
            begin = time.perf_counter()
            self._move(dist.isend, self._word.fill_(size), peer)
            self._move(dist.isend, self._payload[: size // 4], peer)
            self._move(dist.irecv, self._word, peer)
            took = time.perf_counter() - begin
            best, spent, count = max(best, size / took / 1e6), spent + took, count + 1
            if took < BURST_S / SAMPLES:
                size = min(size * 2, LAST_BYTES)
        self._move(dist.isend, self._word.fill_(0), peer)
        return best

    def receive(self, peer: int) -> None:
        """Be the other end of a `send`."""
        dist = self._dist
        while True:
            self._move(dist.irecv, self._word, peer)
            size = int(self._word.item())
            if not size:
                return
            self._move(dist.irecv, self._payload[: size // 4], peer)
            self._move(dist.isend, self._word, peer)

    def all_reduce(self, count: int) -> tuple[float, bool]:
        """Add up over all members; return the speed in MB/s, and whether the sum is right."""
        dist = self._dist
        world = dist.get_world_size()
        values = self._zeros(count).fill_(dist.get_rank() + 1.0)
        begin = time.perf_counter()
        dist.all_reduce(values)
        right = bool((values == world * (world + 1) / 2).all().item())  # waits for a GPU, too
        return 4 * count / (time.perf_counter() - begin) / 1e6, right


def join(torch: Any, go: dict[str, Any], rank: int) -> Meter:
    """Join the others; raises RuntimeError."""
    dist, world, device = torch.distributed, len(go["members"]), go["device"]
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(go["host"], go["port"], world, rank == 0, timeout=timeout)
    if device != "cpu":
        torch.accelerator.set_device_index(0)  # the first one that this process may see
    backend = dist.get_default_backend_for_device(device)
    # Unbound, NCCL of torch 2.15 takes the device that has the rank's number. And it would end the
    # process at a timeout, where an exception can name the peer.
    bound = {"device_id": torch.device(device, 0)} if device == "cuda" else {}
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout, **bound
    )
    meter = Meter(torch, device)
    meter.all_reduce(REDUCED)  # connects all, as the measured one needs it
    return meter


def accelerators(torch: Any) -> tuple[str | None, int]:
    """Return torch's type of the accelerators here, and their number; None and 0 without any.

    A type whose tensors no backend of this torch sends counts as none: Apple's, or NVIDIA's where
    torch is built without NCCL.
    """
    device, dist = usable(torch), torch.distributed
    if device is None or not dist.is_backend_available(
        dist.get_default_backend_for_device(device.type)
    ):
        return None, 0
    return device.type, torch.accelerator.device_count()


def measure(meter: Meter, names: list[str], rank: int) -> None:
    """Tell the speeds to several others, and that of all together."""
    for turn in range(turns(len(names))):
        peer = partner(rank, len(names), turn)
        if peer is None:
            continue
        try:
            for sender in sorted((rank, peer)):
                if sender == rank:
                    tell(to=names[peer], mb_s=round(meter.send(peer), 1))
                else:
                    meter.receive(peer)
        except RuntimeError as error:
            why = f"no exchange with {names[peer]}: {_first_line(error)}"
            tell(pair=names[peer], check="bandwidth", why=why, turn=turn)
            raise
    speed, right = meter.all_reduce(REDUCED)
    tell(values={"all_reduce_mb_s": round(speed, 1)})
    if not right:
        tell(bad="bandwidth", why="the sum of an all-reduce is wrong here")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def main(argv: list[str]) -> int:
    die_with_parent()
    began = time.time()
    try:
        import torch
        import torch.distributed
    except Exception as error:
        tell(bad="torch", why=f"import torch: {type(error).__name__}: {_first_line(error)}")
        return 0
    device, count = accelerators(torch)
    values = {"torch": torch.__version__, "device": device, "devices": count}
    tell(stage="imported", values={**values, "import_s": round(time.time() - began, 1)})
    go = json.loads(sys.stdin.readline() or "null")
    node = os.environ["HPC_DDP_NODE"]
    if go is None or node not in go["members"]:
        return 0
    rank = go["members"].index(node)
    try:
        meter = join(torch, go, rank)
        for stage in ("done", "again", "third"):
            measure(meter, go["members"], rank)
            tell(stage=stage)
            if not sys.stdin.readline():
                break
    except RuntimeError as error:  # what torch raises, all of it
        tell(stage="done", broken=_first_line(error))
    os._exit(0)  # nothing is left to do, and taking torch apart takes time
