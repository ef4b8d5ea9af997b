"""Loops with Lightning Fabric.

::

    stop = Stop(fabric)                               # after Fabric(…), before fabric.launch()
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    stop.load(model=model, optimizer=optimizer)       # the state of the newest checkpoint
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
    from lightning.fabric import Fabric

STATE, RANDOM = "state", "random-{}.pt"


class Stop(EpochStop):
    """Saves objects by ``fabric.save`` into the run's folder, and stops at the same step on all
    ranks. The options are those of `StopPoint`; UsageError is raised for a wrong one."""

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        super().__init__(format="fabric", **options)
        self._own_names = frozenset(RANDOM.format(rank) for rank in range(self._info.world_size))
        self._fabric = fabric
        self._objects: dict[str, Any] | None = None
        self._begun: dict[str, Any] | None = None  # the generators as the epoch began

    def load(self, **objects: Any) -> int:
        """Name what a checkpoint holds, and load it from the newest one that verifies; return the
        number of steps done, 0 without any.

        All ranks call it after ``fabric.setup``. `objects` have a ``state_dict``: the model, the
        optimizer, a scheduler. Raises as `StopPoint.latest`, and UsageError for other objects.
        """
        for name, entry in objects.items():
            if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
                raise UsageError(
                    f"stop.load({name}=…) is a {type(entry).__name__}; accepted: objects with"
                    " state_dict and load_state_dict, each by a name of its own",
                    hint="plain values: stop.facts",
                )
        self._objects = objects
        models = (model for model in objects.values() if isinstance(model, torch.nn.Module))
        fix_order_of_sums(models)
        if folder := self.latest():
            self._fabric.load(folder / STATE, dict(objects))
            path = folder / RANDOM.format(self.rank)
            if path.exists():  # else: another number of ranks
                self._begun, self._random = torch.load(path, weights_only=True)
        return self.position.step

    def _batches_left(self, loader: Any, epoch: int, done: int) -> Iterator[Any]:
        """Yield the batches behind those that are done, which are read again, and dropped, so that
        random numbers of the data go on as well."""
        generator = generator_of(loader)
        if done and self._begun is not None:
            rng.restore(self._begun, self._devices)
            if generator is not None:
                generator.set_state(self._begun["loader"])
        self._begun = rng.snapshot(self._devices)
        if generator is not None:
            self._begun["loader"] = generator.get_state()
        vars(loader)["_num_iter_calls"] = epoch  # from which Fabric's loader has its order
        batches = iter(loader)
        for _ in range(done):
            next(batches, None)  # a data set may have become smaller
        self._restore_random()  # before the next batch is read
        yield from batches

    def save(self, **values: Any) -> None:
        """End an optimizer step: the run saves, and stops when it has to. `values` as in `step`.
        Raises as `step` and `checkpoint`, UsageError before `load`; errors of ``fabric.save`` and
        ``torch.save`` come through."""
        if self._objects is None:
            raise UsageError(
                "stop.save was called before stop.load, which names what a checkpoint holds",
                hint="stop.load(model=model, optimizer=optimizer)",
            )
        if self.step(epoch=self.facts["epoch"], **values):
            with self.checkpoint() as folder:
                self._fabric.save(folder / STATE, self._objects)
                random = [self._begun, rng.snapshot(self._devices)]
                torch.save(random, folder / RANDOM.format(self.rank))

    @property
    def _devices(self) -> list[torch.device]:
        return [self._fabric.device]
