"""Messages between many ranks: over small groups that are a tree, and not over one group of all.

A Gloo group connects each rank with each other one, and its all-reduce is a ring: for 8,192 ranks
16,382 connections of each rank, for its two groups, and 16,382 hops in a row for each agreement on
a stop. In a tree of groups of `FANOUT` a rank has a connection to its group and, as the first of
it, to those of the groups above; an agreement takes 26 hops.

Lazy connections (TORCH_GLOO_LAZY_INIT) leave the ring, and a rank can hang where its peer ends
before their first message (gloo issue 520).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpc_ddp.training.process.environment import DistEnv
from hpc_ddp.training.process.rank_messages import Control

T = TypeVar("T")

FANOUT = 16  # ranks of a group
MOST_IN_ONE_GROUP = 32  # without a tree


@dataclass(frozen=True)
class Level:
    """A group of the tree that this rank is in. The group's first rank is in the next higher group,
    too."""

    ranks: Sequence[int]
    group: Any


def ranks_of_levels(rank: int, world_size: int, fanout: int) -> list[list[int]]:
    """Return the ranks of each group that a rank is in, from the lowest level up. A group has
    `fanout` ranks, the last one of a level maybe fewer; its first rank is also in a group of the
    next level."""
    groups, stride = [], 1  # a group of level n has every `fanout` ** n-th rank
    while stride < world_size and rank % stride == 0:
        first = rank - rank % (stride * fanout)
        groups.append(list(range(first, min(first + stride * fanout, world_size), stride)))
        stride *= fanout
    return groups


class TreeControl(Control):
    """The messages of `Control`, with the same results; a sum of floating-point numbers is added up
    in another order, which is the same in each run with as many ranks.

    A thread of this object makes the collectives, in the order of the calls. All methods but
    `start_max` and `start_gather` wait for the thread.
    """

    def __init__(self, info: DistEnv, timeout: timedelta) -> None:
        """Make the groups that this rank is in, a collective, and start the thread. `timeout` is
        the longest wait for a peer. Raise RuntimeError if a peer is gone."""
        self.rank, self.world_size, self.timeout = info.rank, info.world_size, timeout
        levels = ranks_of_levels(self.rank, self.world_size, FANOUT)
        self._levels = [Level(ranks, _new_group(ranks, timeout)) for ranks in levels]
        # torch names a group by its ranks and the number of groups so far, which has to be the same
        # on all ranks: rank 0 is in most of them.
        for _ in ranks_of_levels(0, self.world_size, FANOUT)[len(levels) :]:
            _new_group([self.rank], timeout)
        self._calls = _CallQueue()

    def start_max(self, values: torch.Tensor) -> Any:
        return self._calls.begin(lambda: self._reduce(values, dist.ReduceOp.MAX))

    def _begin_gather(self, values: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        return self._calls.begin(lambda: self._gather(values, tensors))

    def sum(self, values: torch.Tensor) -> None:
        self._calls.run(lambda: self._reduce(values, dist.ReduceOp.SUM))

    def from_first(self, message: Any) -> Any:
        return self._calls.run(lambda: self._broadcast_object(message))

    def to_first(self, message: Any) -> list[Any]:
        return self._calls.run(lambda: self._gather_objects(message))

    def barrier(self) -> None:
        self._calls.run(
            lambda: self._reduce(
                torch.zeros(1, dtype=torch.float32, device="cpu"), dist.ReduceOp.MAX
            )
        )

    # --- in the thread ----------------------------------------------------------------------

    def _reduce(self, values: torch.Tensor, operation: Any) -> None:
        """Replace a tensor by its sum or maximum over all ranks."""
        for level in self._levels:
            dist.reduce(values, dst=level.ranks[0], op=operation, group=level.group)
        self._broadcast(values)

    def _broadcast(self, values: torch.Tensor) -> None:
        """Overwrite a tensor with rank 0's."""
        for level in reversed(self._levels):
            dist.broadcast(values, src=level.ranks[0], group=level.group)

    def _gather(self, values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Write all ranks' values into the `tensors` of rank 0 ([] on other ranks).

        At each level a rank sends a row for itself and each rank below it. All ranks of a group
        send as many rows: the last one, which may have fewer, adds zeros, which so come last.
        """
        rows, size = values.detach().unsqueeze(0), 1  # size: rows that a rank sends
        for level in self._levels:
            block = torch.zeros(size, *values.shape, dtype=values.dtype, device="cpu")
            block[: len(rows)] = rows
            is_first = self.rank == level.ranks[0]
            blocks = [torch.empty_like(block) for _ in level.ranks] if is_first else None
            dist.gather(block, blocks, dst=level.ranks[0], group=level.group)
            rows, size = torch.cat(blocks or [block]), size * FANOUT
        for tensor, row in zip(tensors, rows, strict=False):  # further rows are the zeros
            tensor.copy_(row)

    def _broadcast_object(self, message: T) -> T:
        """Return rank 0's message on every rank."""
        box = [message]
        for level in reversed(self._levels):
            dist.broadcast_object_list(box, src=level.ranks[0], group=level.group)
        return box[0]

    def _gather_objects(self, message: T) -> list[T]:
        """Return all ranks' messages on rank 0, by rank; [] on other ranks."""
        messages = [message]  # of this rank and the ranks below it
        for level in self._levels:
            is_first = self.rank == level.ranks[0]
            lists: list[Any] | None = [None] * len(level.ranks) if is_first else None
            dist.gather_object(messages, lists, dst=level.ranks[0], group=level.group)
            messages = [entry for entries in lists or [] for entry in entries]
        return messages


def _new_group(ranks: Sequence[int], timeout: timedelta) -> Any:
    """Make a Gloo group, and return it: a collective of its own ranks, not of all ranks."""
    return dist.new_group(
        list(ranks), backend="gloo", timeout=timeout, use_local_synchronization=True
    )


class _Call(Future[Any]):
    """A call of a `_CallQueue`, with the `wait` of torch's work."""

    def wait(self) -> Any:
        """Wait for the end; return the result or raise the error."""
        return self.result()


class _CallQueue:
    """Makes calls one after the other in a thread. The end of the process does not wait for this
    thread, as it would for an executor's."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[_Call, Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._serve, name="hpc-ddp control", daemon=True).start()

    def begin(self, act: Callable[[], Any]) -> _Call:
        """Queue a call, and return it."""
        call = _Call()
        self._queue.put((call, act))
        return call

    def run(self, act: Callable[[], T]) -> T:
        """Queue a call, and return its result or raise its error."""
        result: T = self.begin(act).wait()
        return result

    def _serve(self) -> None:
        """Make the calls for ever, in the thread; each keeps its result or error."""
        while True:
            call, act = self._queue.get()
            try:
                call.set_result(act())
            except BaseException as error:
                call.set_exception(error)


def open_control(info: DistEnv, timeout: timedelta) -> Control:
    """Return a new `Control` of the ranks of the default process group, which wait `timeout` for
    each other at most: a tree for more than `MOST_IN_ONE_GROUP` ranks. It is a collective. Raise
    RuntimeError if a peer is gone."""
    if info.world_size > MOST_IN_ONE_GROUP:
        return TreeControl(info, timeout)
    return Control(info, timeout)
