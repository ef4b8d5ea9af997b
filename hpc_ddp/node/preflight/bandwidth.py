"""The part of the preflight that needs torch: its import, and the speeds between nodes.

An all-reduce is as slow as its slowest link, and fails on all nodes alike if one link is dead: it
names no node. So before it each node exchanges tensors with several others in turn. The best of
these speeds counts as the node's own: a slow partner does no harm. Only the first device of a node
is measured, and so only one of its network cards. Where NCCL can't even start, all nodes report
that, and no node is named.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from hpc_ddp.core.accelerators import usable_accelerator
from hpc_ddp.node.preflight.messages import report

TURNS = 5  # in which a node meets at least three others, where there are that many
EXCHANGE_REPEATS = 5  # of an exchange, of which the best counts: disturbances only slow down
TIMEOUT_S = 30.0  # of the group, on nodes that are not busy
SMALL_ELEMENTS, LARGE_ELEMENTS = 256 << 10, 4 << 20  # elements of an exchange, 1 and 16 MiB
FAST_MB_S = 100.0
ALL_REDUCE_ELEMENTS = 1 << 20  # elements of the all-reduce, 4 MiB


def import_torch() -> Any:
    """Import torch and return the module; print (`report`) its version and accelerators, and that
    the stage ``torch`` is completed. If torch can't be imported, report only a fault, and return
    None."""
    try:
        import torch
        import torch.distributed
    except Exception as error:
        report(fault="torch", why=f"import torch: {type(error).__name__}: {_first_line(error)}")
        return None
    device, count = accelerators(torch)
    values = {"torch": torch.__version__, "device": device, "devices": count}
    report(stage="torch", values=values)
    return torch


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type's name where it has no text."""
    return (str(error) or type(error).__name__).splitlines()[0]


def accelerators(torch: Any) -> tuple[str | None, int]:
    """Return torch's name for the type of this node's accelerators, as ``cuda``, and their number;
    None and 0 without accelerators. `torch` is the module.

    Accelerators whose tensors no backend of this torch can send do not count: Apple's, and NVIDIA's
    where torch is built without NCCL.
    """
    device, dist = usable_accelerator(torch), torch.distributed
    if device is None or not dist.is_backend_available(
        dist.get_default_backend_for_device(device.type)
    ):
        return None, 0
    return device.type, torch.accelerator.device_count()


def partner(rank: int, world: int, turn: int) -> int | None:
    """Return the rank, of `world` ranks, that the rank `rank` meets in a turn; None if `rank`
    pauses. In any `world` consecutive turns each rank meets each other rank once."""
    peer = (turn - rank) % world
    return None if peer == rank else peer


class Group(NamedTuple):
    """The last question, with the same keys as in JSON."""

    members: Sequence[str]  # names of the nodes that exchange, by rank
    host: str  # of rank 0, where the store is
    port: int
    device: str  # type of the tensors' device, as ``cuda`` or ``cpu``
    first: int  # number of the exchanges' first turn
    timeout_s: float  # of each operation


class Meter:
    """Measures the links between the members of a process group, by tensors on a device.

    Its methods raise RuntimeError when a link breaks or is silent for the group's time limit.
    """

    def __init__(self, torch: Any, device: str) -> None:
        """Keep the module torch, and `device`, the type of the tensors' device, as ``cuda``. The
        process group must exist before the first measurement."""
        self._torch, self._dist, self._device = torch, torch.distributed, device

    def _tensor(self, count: int, number: float) -> Any:
        """Return a float32 tensor of shape (count,) on the device, filled with a number."""
        return self._torch.full((count,), number, dtype=self._torch.float32, device=self._device)

    def exchange(self, peer: int) -> float:
        """Send tensors to the rank `peer`, and receive equally large tensors from it at the same
        time; return the best speed in MB/s. The peer has to call this too.

        The speed of small tensors is the lower of both ends' measurements, since an end counts
        bytes as sent that only lie in its buffer. Large tensors follow only if that speed is over
        `FAST_MB_S`: a slow link must not keep the other members waiting.
        """
        speed = self._best_speed(peer, SMALL_ELEMENTS)
        speed_of_peer = self._tensor(1, 0.0)
        self._swap(self._tensor(1, speed), speed_of_peer, peer)
        speed = min(speed, float(speed_of_peer.item()))
        if speed > FAST_MB_S:
            speed = max(speed, self._best_speed(peer, LARGE_ELEMENTS))
        return speed

    def _best_speed(self, peer: int, count: int) -> float:
        """Exchange `count` elements with the rank `peer` `EXCHANGE_REPEATS` times; return the best
        speed in MB/s. The peer has to call this too."""
        outgoing, incoming = self._tensor(count, 1.0), self._tensor(count, 0.0)
        return max(
            _speed(count, self._swap(outgoing, incoming, peer)) for _ in range(EXCHANGE_REPEATS)
        )

    def _swap(self, outgoing: Any, incoming: Any, peer: int) -> float:
        """Send the tensor `outgoing` to the rank `peer`, and at the same time fill the tensor
        `incoming`, of the same size, with what the peer sends; return how many seconds that took,
        with the device's work. The peer has to call this too."""
        dist, begin = self._dist, time.perf_counter()
        pair = [dist.P2POp(dist.isend, outgoing, peer), dist.P2POp(dist.irecv, incoming, peer)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        if self._device != "cpu":
            self._torch.accelerator.synchronize()
        return time.perf_counter() - begin

    def all_reduce(self, count: int) -> tuple[float, bool]:
        """Add up tensors of `count` elements over all members by a collective; return the speed in
        MB/s, and whether the sum is right. Every member must call this."""
        dist = self._dist
        world = dist.get_world_size()
        tensor = self._tensor(count, dist.get_rank() + 1.0)
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        right_sum = world * (world + 1) / 2  # of the numbers 1 to `world`
        is_right = bool((tensor == right_sum).all().item())  # .item() waits for a GPU's work
        return _speed(count, time.perf_counter() - begin), is_right


def _speed(count: int, duration_s: float) -> float:
    """Return the speed in MB/s of `count` float32 elements that took `duration_s`."""
    return 4 * count / duration_s / 1e6


def join_group(torch: Any, server: socket.socket, group: Group, rank: int) -> Meter:
    """Join the process group as `rank`, and return the group's meter. Every member must call this.
    Links are made when they are first used, apart from backends that need all members for that.

    Rank 0 serves the store by its socket `server`, which the store then owns. The first device
    becomes torch's current device. Variables of NCCL and gloo are set in the process's environment.
    The group stays until the process ends. Raise RuntimeError if the other members do not come
    within the group's time limit, or a link breaks.
    """
    world, device = len(group.members), group.device
    dist, timeout = torch.distributed, timedelta(seconds=group.timeout_s)
    listener = {"master_listen_fd": server.detach()} if rank == 0 else {}
    store = dist.TCPStore(group.host, group.port, world, rank == 0, timeout=timeout, **listener)
    if device != "cpu":
        torch.accelerator.set_device_index(0)  # the first device that this process may see
    backend = dist.get_default_backend_for_device(device)
    # Without this NCCL of torch 2.15 takes the device that has the rank's number.
    binding = {"device_id": torch.device(device, 0)} if device == "cuda" else {}
    # Without this NCCL ends the process at a timeout, where an exception can name the peer.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else each member connects to each other
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout, **binding
    )
    meter = Meter(torch, device)
    if device != "cpu" and not binding:  # the backend's first call has to be one of all members
        meter.all_reduce(1)
    return meter


def measure_links(meter: Meter, members: Sequence[str], rank: int, first: int) -> None:
    """Exchange tensors with other members in at most `TURNS` turns, from the turn `first` on, then
    make an all-reduce; print (`report`) the best speed of the exchanges and that of the all-reduce.
    Every member must call this; `members` are the nodes' names by rank, two at least.

    The first exchange that fails is reported as trouble with its partner; then nothing more is
    measured, and no speed reported. A wrong sum of the all-reduce is reported as a fault. Raise
    RuntimeError if the all-reduce fails.
    """
    speeds = []
    for turn in range(first, first + min(TURNS, len(members))):
        peer = partner(rank, len(members), turn)
        if peer is None:
            continue
        try:
            speeds.append(meter.exchange(peer))
        except RuntimeError as error:
            why = f"no exchange with {members[peer]}: {_first_line(error)}"
            report(trouble=members[peer], check="bandwidth", why=why, turn=turn)
            return
    meter.all_reduce(1)  # a first all-reduce makes the links, and would be slow
    speed, is_right = meter.all_reduce(ALL_REDUCE_ELEMENTS)
    values = {"exchange_mb_s": round(max(speeds), 1), "all_reduce_mb_s": round(speed, 1)}
    report(values=values)
    if not is_right:
        report(fault="bandwidth", why="the sum of an all-reduce is wrong here")


def measure_group(torch: Any, node: str, server: socket.socket, group: Group) -> None:
    """Join the process group, measure the speeds between its members, and print them (`report`).
    Every member must call this. `node` is this node, one of the members; `server` is the socket for
    `join_group`.

    A RuntimeError of torch is reported as ``exchange_error``. In any case the stage ``exchange`` is
    then reported as completed.
    """
    rank = group.members.index(node)
    try:
        meter = join_group(torch, server, group, rank)
        measure_links(meter, group.members, rank, group.first)
    except RuntimeError as error:  # torch raises nothing else
        report(values={"exchange_error": _first_line(error)})
    report(stage="exchange")
