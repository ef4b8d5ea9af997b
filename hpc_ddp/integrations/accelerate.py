"""Loops with Hugging Face Accelerate.

::

    stop = Stop(accelerator)                          # after Accelerator(…)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    stop.load(model)                                  # the state of the newest checkpoint
    for epoch in range(stop.position.epoch, 10):
        for x, y in stop.batches(loader, epoch):      # those that are left
            ...
            optimizer.step()
            stop.save(loss=loss)                      # saves and stops when it is time to
    stop.finish()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.epochs import EpochStop, generator_of
from hpc_ddp.integrations.stop_point import fix_order_of_sums
from hpc_ddp.training.models import rng

if TYPE_CHECKING:
    from accelerate import Accelerator

STATE, ORDER = "state", "order.pt"


class Stop(EpochStop):
    """Saves the state of an Accelerator into the run's folder, and stops at the same step on all
    ranks. The options are those of `StopPoint`; UsageError is raised for a wrong one, and for
    ``automatic_checkpoint_naming``."""

    _own_names = frozenset({ORDER})

    def __init__(self, accelerator: Accelerator, **options: Any) -> None:
        if accelerator.project_configuration.automatic_checkpoint_naming:
            raise UsageError(
                "automatic_checkpoint_naming is True, and the Accelerator then saves into a folder"
                " of its own, not into the run's; accepted: False",
                hint="ProjectConfiguration(…, automatic_checkpoint_naming=False)",
            )
        super().__init__(format="accelerate", **options)
        self._accelerator = accelerator
        self._order: torch.Tensor | None = None  # the sampler's generator as the epoch began
        self._samples = 0  # of all ranks in a batch

    def load(self, *models: Any) -> int:
        """Load the newest checkpoint that verifies; return the number of steps done, 0 without any.

        All ranks call it after ``accelerator.prepare``, with the models that it returned: without
        them a stop may change the last bits of the weights, from three ranks on. Raises as
        `StopPoint.latest`.
        """
        fix_order_of_sums(models)
        if folder := self.latest():
            self._accelerator.load_state(str(folder / STATE))
            self._random = rng.snapshot(self._devices)
            if (path := folder / ORDER).exists():
                self._order = torch.load(path, weights_only=True)
        return self.position.step

    def _batches_left(self, loader: Any, epoch: int, done: int) -> Iterator[Any]:
        self._samples = getattr(loader, "total_batch_size", 0)
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        # Of a shuffle: one for all ranks, or what a loader of one process seeds its own with.
        generator = getattr(loader, "synchronized_generator", None) or generator_of(loader)
        generator = generator or torch.default_generator
        if done and self._order is not None:
            generator.set_state(self._order)
        self._order = generator.get_state()
        yield from self._accelerator.skip_first_batches(loader, done) if done else loader

    def save(self, **values: Any) -> None:
        """End a batch: the run saves, and stops when it has to; nothing within an accumulation.
        `values` as in `step`. Raises as `step` and `checkpoint`; errors of ``save_state`` and
        ``torch.save`` come through."""
        if not self._accelerator.sync_gradients:
            return
        samples = self._samples * self._accelerator.gradient_accumulation_steps
        if self.step(epoch=self.facts["epoch"], samples=samples, **values):
            with self.checkpoint() as folder:
                self._accelerator.save_state(str(folder / STATE))
                if self.rank == 0 and self._order is not None:
                    torch.save(self._order, folder / ORDER)

    @property
    def _devices(self) -> list[torch.device]:
        return [self._accelerator.device]
