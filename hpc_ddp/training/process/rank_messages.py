"""Messages between ranks, apart from the gradients, on the CPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpc_ddp.training.process.environment import DistEnv

NEVER = timedelta(days=20)  # torch counts milliseconds, in places with 31 bits


class Control:
    """Messages of the ranks on the CPU, over a gloo group of its own.

    So a flag never waits behind gradients, needs no GPU, and can travel while a step computes. All
    ranks make a `Control` at the same time, one for each thread. Its methods are collectives: all
    ranks call them in the same order; RuntimeError is raised when a peer is gone, or has not called
    for as long as `timeout`.
    """

    def __init__(self, info: DistEnv, timeout: timedelta) -> None:
        """Make a gloo group of all ranks, a collective; `info` has this process's rank, `timeout`
        is the longest wait for a peer. Raise RuntimeError if a peer is gone."""
        self.rank = info.rank
        self.world_size = info.world_size
        self.timeout = timeout
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)

    def start_max(self, values: torch.Tensor) -> Any:
        """Begin to replace a CPU tensor, number by number, by its maximum over ranks. Return work
        whose `wait` returns once the maximum is there: until then the tensor is not to be used."""
        return dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def start_gather(self, values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        """Begin to send a CPU tensor to rank 0. Return all ranks' tensors on rank 0, by rank, [] on
        other ranks; and work whose `wait` returns once the tensors are there.

        `values` has the same shape and type on all ranks, and must not change before `wait`
        returns.
        """
        tensors = [
            torch.empty_like(values) for _ in range(self.world_size if self.rank == 0 else 0)
        ]
        return tensors, self._begin_gather(values, tensors)

    def _begin_gather(self, values: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        """Begin to write all ranks' `values` into rank 0's `tensors` ([] on other ranks); return
        work whose `wait` returns once they are there."""
        return dist.gather(values, tensors or None, dst=0, group=self._group, async_op=True)

    def sum(self, values: torch.Tensor) -> None:
        """Replace a CPU tensor by its sum over ranks."""
        dist.all_reduce(values, group=self._group)

    def from_first(self, message: Any) -> Any:
        """Return rank 0's message, which can be pickled, on every rank; other ranks' `message` is
        ignored."""
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def to_first(self, message: Any) -> list[Any]:
        """Return every rank's message (it can be pickled) on rank 0, by rank; [] on other ranks."""
        messages: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(message, messages, dst=0, group=self._group)
        return messages or []

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        # torch's barrier makes a tensor on the GPU that the run's group is bound to, in any group.
        self.sum(torch.zeros(1, dtype=torch.float32, device="cpu"))


class _Done:
    """The work of a message that has arrived."""

    def wait(self) -> None:
        """Return at once."""


_DONE = _Done()


class LoneControl(Control):
    """The messages of a process alone, which needs no process group for them."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.timeout = 0, 1, NEVER

    def start_max(self, values: torch.Tensor) -> Any:
        return _DONE

    def start_gather(self, values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        return [values], _DONE

    def sum(self, values: torch.Tensor) -> None:
        """Leave the tensor as it is."""

    def from_first(self, message: Any) -> Any:
        return message

    def to_first(self, message: Any) -> list[Any]:
        return [message]

    def barrier(self) -> None:
        """Return at once."""
