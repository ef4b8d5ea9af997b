"""How long a step is this rank's own work, and how long it waits for its peers.

All ranks end a step together, so its duration tells nothing of them. Under DDP a rank waits in two
places: behind its own backward for the others' gradients, and in front of its forward for rank 0's
buffers (of batch norm, say). What is left of a step is its own. On a GPU the same moments are
marked in the stream, since the CPU runs ahead of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hpc_ddp.run.events import StepTiming
from hpc_ddp.run.journal import Journal
from hpc_ddp.training import devices
from hpc_ddp.training.control import Control
from hpc_ddp.training.order import Position

EVERY_S, SELDOM_S = 30.0, 300.0  # between two events, at first and at last
SAMPLE_S = 0.05  # of shorter steps one is measured in this time: it takes up to 0.1 ms
DIGITS = 4

Mark = Any  # a moment: seconds, or torch.Event


class Effort:
    """Measures this rank's steps; rank 0 gathers what all have measured, and journals it.

    `nodes` are the names of the ranks' nodes, on rank 0. A rank's own work can be told only of
    models that are given to `watch`.
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
        self._watches = self._sampling = False
        self._computed: Mark = None
        self._waits: list[tuple[Mark, Mark]] = []
        self._measured: list[tuple[Mark, Mark, list[tuple[Mark, Mark]]]] = []
        self._gathered: tuple[int, Any, Any] | None = None
        self._next_sample = self._step_began = 0.0
        self._began = time.monotonic()
        self._due_at = self._began + EVERY_S
        self._clear()

    def _clear(self) -> None:
        self._steps = self._samples = 0
        self._wall_s = self._own_s = self._data_s = 0.0

    # -- where time goes -------------------------------------------------------------------

    def step_begins(self) -> None:
        """Start the clock: between two steps may lie a save, or the end of an epoch."""
        self._step_began = time.perf_counter()
        self._sampling = self._watches and self._step_began >= self._next_sample
        if self._sampling:
            self._next_sample = self._step_began + SAMPLE_S
            self._waits = []
            self._step_mark = self._mark()

    def step_ends(self) -> None:
        if not self._step_began:
            return
        self._steps += 1
        self._wall_s += time.perf_counter() - self._step_began
        if self._sampling:
            self._measured.append((self._step_mark, self._mark(), self._waits))
            self._sampling = False
            self._add_up()
        self._step_began = 0.0

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """Pass batches on, and count the time that they are waited for."""
        while True:
            begin = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._data_s += time.perf_counter() - begin
            yield batch

    def backward(self, loss: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        """Run a backward, and note how long it lasts beyond its own computing."""
        if not self._sampling or not loss.requires_grad:
            run(loss)
            return
        self._computed = None
        hooks: Any = loss  # without types in torch
        handle = hooks.register_hook(self._queue_note)
        run(loss)
        handle.remove()
        if self._computed is not None:
            self._waits.append((self._computed, self._mark()))

    def _queue_note(self, gradient: torch.Tensor) -> None:
        # As backward begins: its callbacks run in order, and DDP asks for its own, in which it
        # waits for the gradients' sums, with its last gradient.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._note)

    def _note(self) -> None:
        self._computed = self._mark()

    def watch(self, model: DistributedDataParallel) -> None:
        """Measure steps of this model, and how long its forward waits for rank 0's buffers."""
        self._watches = self._control.world_size > 1
        sync: Callable[[], None] | None = getattr(model, "_sync_buffers", None)
        if sync is None or not list(model.buffers()):
            return

        def timed() -> None:
            if not self._sampling:
                sync()
                return
            begin = self._mark()
            sync()
            self._waits.append((begin, self._mark()))

        model._sync_buffers = timed  # type: ignore[method-assign]

    def _mark(self) -> Mark:
        return devices.mark(self._device, timed=True) if self._on_gpu else time.perf_counter()

    def _add_up(self) -> None:
        """Count the measured steps that are over; the GPU may be behind."""
        while self._measured:
            begin, end, waits = self._measured[0]
            if self._on_gpu and not end.query():
                return
            self._own_s += self._between(begin, end) - sum(self._between(a, b) for a, b in waits)
            self._samples += 1
            del self._measured[0]

    def _between(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin)

    # -- what all ranks measured -----------------------------------------------------------

    def due(self) -> bool:
        """Tell whether it is time to gather; rank 0's word counts."""
        several = self._control.world_size > 1 and self._control.rank == 0
        return several and time.monotonic() >= self._due_at

    def gather(self) -> None:
        """Send the means since the last time to rank 0. All ranks call it at the same step."""
        now = time.monotonic()
        self._due_at = now + min(max(EVERY_S, (now - self._began) / 100), SELDOM_S)
        steps = max(self._steps, 1)
        own_s = self._own_s / self._samples if self._samples else math.nan
        mine = [self._wall_s / steps, own_s, self._data_s / steps, float(self._steps)]
        sent = self._control.start_gather(torch.tensor(mine, dtype=torch.float64, device="cpu"))
        self._gathered = self._position.step, *sent
        self._clear()

    def tell(self) -> None:
        """Journal what was gathered, some steps later, so that no step waits for it."""
        if self._gathered is None:
            return
        step, found, work = self._gathered
        self._gathered = None
        work.wait()
        if not found or not found[0][3]:
            return
        step_s, own_s, data_s, steps = ([row[i].item() for row in found] for i in range(4))
        known = not any(map(math.isnan, own_s))
        most = own_s if known else data_s
        slowest = most.index(max(most))
        self._journal.write_later(
            StepTiming(
                step,
                int(steps[0]),
                _short(step_s[0]),
                [_short(seconds) for seconds in data_s],
                slowest,
                self._nodes[slowest],
                [_short(seconds) for seconds in own_s] if known else None,
            )
        )


def _short(seconds: float) -> float:
    return float(f"{max(seconds, 0.0):.{DIGITS}g}")
