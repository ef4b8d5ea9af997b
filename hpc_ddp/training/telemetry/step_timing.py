"""How long each rank itself works in a step: its wait for data, and its forward.

All ranks end a step together, so its duration does not show which of them is slow. DDP's ranks wait
for each other in the backward; so the time from a batch to its backward, and the wait for the
loader, are a rank's own. (In front of a forward the others may wait for rank 0's buffers, so of a
model with buffers a slow forward of rank 0 can't be seen.) On a GPU the forward is timed in the
stream, since the CPU runs ahead of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.core.journal.stragglers import summarize_times
from hpc_ddp.training import devices
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.process.control import Control

EVERY_S, SELDOM_S = 30.0, 300.0  # between two events, at first and at last
SAMPLE_S = 0.05  # at most one step in this time is measured, since events of a GPU cost some us

Mark = Any  # a moment: seconds, or torch.Event


class StepTimer:
    """Times this rank's steps; rank 0 gathers the means of all ranks, and journals them.

    `nodes` are the names of the ranks' nodes, by rank, on rank 0. Forwards are timed where there
    are several ranks and `has_ddp` is set, as `Run.wrap` does: forwards under other strategies wait
    for peers.
    """

    def __init__(
        self,
        control: Control,
        journal: Journal,
        position: Position,
        device: torch.device,
        nodes: Sequence[str],
    ) -> None:
        self._control, self._journal, self._position = control, journal, position
        self._nodes = nodes
        self._device, self._on_gpu = device, devices.is_accelerator(device)
        self.has_ddp = self._is_sampled = False
        self._forward_start: Mark = None
        self._forwards: list[tuple[Mark, Mark]] = []  # of the last sampled step
        self._gathered: tuple[int, Any, Any] | None = None  # step, tensors and work under way
        self._next_sample = self._step_start = 0.0  # when; 0 for the start: no step has begun
        self._began = time.monotonic()
        self._due_at = self._began + EVERY_S
        self._clear()

    def _clear(self) -> None:
        """Set the sums for the means to 0: the number of steps, the number of those with a timed
        forward, and the seconds."""
        self._steps = self._samples = 0
        self._wall_s = self._forward_s = self._data_s = 0.0

    def start_step(self) -> None:
        """Start the clock of a step: a save, or the end of an epoch, may lie between two steps. In
        at most one step per `SAMPLE_S` seconds also start the clock of the forward."""
        self._step_start = time.perf_counter()
        is_measured = self.has_ddp and self._control.world_size > 1
        if self._is_sampled:  # and not ended
            self._forwards = []
        is_due = self._step_start >= self._next_sample and not self._forwards
        self._is_sampled = is_measured and is_due
        if self._is_sampled:
            self._next_sample = self._step_start + SAMPLE_S
            self._forward_start = self._mark()

    def end_step(self) -> None:
        """Count the step and its seconds, and the forwards of the last sampled step if they are
        over. Does nothing unless `start_step` was called since the last call."""
        if not self._step_start:
            return
        self._steps += 1
        self._wall_s += time.perf_counter() - self._step_start
        self._is_sampled, self._step_start = False, 0.0
        self._add_forwards()

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of `source`, and count the seconds that each is waited for; in a step
        that is sampled the forward's clock starts when the batch has come."""
        while True:
            start = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._data_s += time.perf_counter() - start
            if self._is_sampled:
                self._forward_start = self._mark()
            yield batch

    def end_forward(self) -> None:
        """In a step that is sampled, note the time of a forward: since the batch came, or since the
        step or the last backward began. While a graph is captured, of which an event would be part,
        the step is no longer sampled."""
        if self._is_sampled and self._on_gpu and devices.is_capturing(self._device):
            self._is_sampled, self._forwards = False, []
        if self._is_sampled:
            mark = self._mark()
            self._forwards.append((self._forward_start, mark))
            self._forward_start = mark

    def _mark(self) -> Mark:
        """Return this moment: seconds, or on a GPU an event in its stream."""
        return devices.mark(self._device, timed=True) if self._on_gpu else time.perf_counter()

    def _add_forwards(self) -> None:
        """Add up the forwards of the last sampled step, if the GPU, which may be behind, has done
        them."""
        if not self._forwards or (self._on_gpu and not self._forwards[-1][1].query()):
            return
        self._forward_s += sum(self._between(start, end) for start, end in self._forwards)
        self._samples += 1
        self._forwards = []

    def _between(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks, nan where the device does not tell."""
        return devices.elapsed_s(start, end) if self._on_gpu else float(end - start)

    def is_due(self) -> bool:
        """Return whether it is time to gather; False but on rank 0, whose answer counts."""
        several = self._control.world_size > 1 and self._control.rank == 0
        return several and time.monotonic() >= self._due_at

    def gather(self) -> None:
        """Begin to send this rank's means since the last call to rank 0, in seconds: of a step, of
        its own work in it (nan without a timed forward), of its wait for data; and the number of
        steps. `report` journals them. Every rank must call it, at the same step; raise RuntimeError
        if a peer is gone."""
        now = time.monotonic()
        self._due_at = now + min(max(EVERY_S, (now - self._began) / 100), SELDOM_S)
        steps = max(self._steps, 1)
        data_s = self._data_s / steps
        busy_s = data_s + self._forward_s / self._samples if self._samples else math.nan
        means = [self._wall_s / steps, busy_s, data_s, float(self._steps)]
        gather = self._control.start_gather(torch.tensor(means, dtype=torch.float64, device="cpu"))
        self._gathered = self._position.step, *gather
        self._clear()

    def report(self) -> None:
        """Journal on rank 0 the means of the last `gather`, unless they have been; called some
        steps after it, so that no step waits for a peer.

        Nothing is journalled if no step was counted. Raise RuntimeError if a peer is gone.
        """
        if self._gathered is None:
            return
        step, rows, work = self._gathered
        self._gathered = None
        work.wait()
        if not rows or not rows[0][3]:
            return
        step_s, busy_s, data_s, steps = torch.stack(rows).T.tolist()
        own_s = None if any(map(math.isnan, busy_s)) else busy_s
        self._journal.write_later(
            summarize_times(step, int(steps[0]), step_s[0], data_s, own_s, self._nodes)
        )
