"""The time of each rank's own work in a step: its wait for data, and its forward.

All ranks end a step together, so its duration does not show which rank is slow. DDP's ranks wait
for each other in the backward; so the time from a batch to its backward, and the wait for the
loader, are a rank's own. (Before a forward the other ranks may wait for rank 0's buffers, so in a
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
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.process.rank_messages import Control

EVERY_S, SELDOM_S = 30.0, 300.0  # seconds between two events of the journal, at first and later
SAMPLE_S = 0.05  # at most one step in this time is measured, since events of a GPU cost some us

Mark = Any  # a moment: seconds of time.perf_counter, or a torch.Event


class StepTimer:
    """Times this rank's steps; rank 0 gathers the means of all ranks, and journals them.

    `control` carries messages between the ranks; `position` is the run's, and `device` this rank's.
    `nodes` are, on rank 0, the names of the ranks' nodes, by rank.
    Forwards are timed if there are several ranks and `Run.wrap` has set `has_ddp`: forwards under
    other strategies wait for peers.
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
        self._gathered: tuple[int, Any, Any] | None = None  # step, tensors and work of a gather
        # On the clock of time.perf_counter: when the next step may be sampled, and when the step
        # under way began (0 before it).
        self._next_sample = self._step_start = 0.0
        self._began = time.monotonic()
        self._due_at = self._began + EVERY_S
        self._clear()

    def _clear(self) -> None:
        """Set the sums for the means to 0: the number of steps, the number of those with a timed
        forward, and the seconds."""
        self._steps = self._samples = 0
        self._wall_s = self._forward_s = self._data_s = 0.0

    def start_step(self) -> None:
        """Start the clock of a step; time before it, as of a save or an epoch's end, is not
        counted. In at most one step per `SAMPLE_S` seconds also start the forward's clock."""
        self._step_start = time.perf_counter()
        is_measured = self.has_ddp and self._control.world_size > 1
        if self._is_sampled:  # the last step has not ended: `end_step` was not called
            self._forwards = []
        is_due = self._step_start >= self._next_sample and not self._forwards
        self._is_sampled = is_measured and is_due
        if self._is_sampled:
            self._next_sample = self._step_start + SAMPLE_S
            self._forward_start = self._mark()

    def end_step(self) -> None:
        """Count the step and its seconds, and the forwards of the last sampled step if the device
        has done them. Do nothing unless `start_step` was called since the last call."""
        if not self._step_start:
            return
        self._steps += 1
        self._wall_s += time.perf_counter() - self._step_start
        self._is_sampled, self._step_start = False, 0.0
        self._add_forwards()

    def time_batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of `source`, and count the seconds of the wait for each. In a sampled
        step start the forward's clock again when the batch has come."""
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
        """Called before each backward. In a sampled step note the time of the forward: since the
        batch came, or since the step or the last backward began. While a CUDA graph is captured,
        end the sampling of the step: an event would become part of the graph."""
        if self._is_sampled and self._on_gpu and devices.is_capturing(self._device):
            self._is_sampled, self._forwards = False, []
        if self._is_sampled:
            mark = self._mark()
            self._forwards.append((self._forward_start, mark))
            self._forward_start = mark

    def _mark(self) -> Mark:
        """Return this moment: seconds, or on a GPU a new event in its stream."""
        return devices.mark(self._device, timed=True) if self._on_gpu else time.perf_counter()

    def _add_forwards(self) -> None:
        """Add the forwards of the last sampled step to the sum, if the GPU has done them; else
        leave them for a later step."""
        if not self._forwards or (self._on_gpu and not self._forwards[-1][1].query()):
            return
        self._forward_s += sum(self._between(start, end) for start, end in self._forwards)
        self._samples += 1
        self._forwards = []

    def _between(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks that are over; nan where the device's events have no
        times."""
        return devices.elapsed_s(start, end) if self._on_gpu else float(end - start)

    def is_due(self) -> bool:
        """Return whether it is time to gather. Only rank 0 decides: False on other ranks, and if
        there is one rank."""
        decides = self._control.world_size > 1 and self._control.rank == 0
        return decides and time.monotonic() >= self._due_at

    def gather(self) -> None:
        """Begin to send this rank's means since the last call to rank 0: the seconds of a step, of
        the rank's own work in it (nan without a timed forward), and of its wait for data; and the
        number of steps. `report` journals them. Every rank must call it, at the same step; raise
        RuntimeError if a peer is gone."""
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
        """End the last `gather`, and on rank 0 journal its means, once. Called some steps after it,
        so that no step waits for a peer.

        Nothing is journalled if rank 0 has counted no step. Raise RuntimeError if a peer is gone.
        """
        if self._gathered is None:
            return
        step, rows, work = self._gathered
        self._gathered = None
        work.wait()
        if not rows or not rows[0][3]:  # another rank; or no step of rank 0
            return
        step_s, busy_s, data_s, steps = torch.stack(rows).T.tolist()
        own_s = None if any(map(math.isnan, busy_s)) else busy_s
        self._journal.write_later(
            summarize_times(step, int(steps[0]), step_s[0], data_s, own_s, self._nodes)
        )
