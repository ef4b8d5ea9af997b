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
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.epochs import EpochStop, find_generators_of_loader

if TYPE_CHECKING:
    from lightning.fabric import Fabric

STATE = "state"


class Stop(EpochStop):
    """Saves objects by ``fabric.save`` into the run's folder, and stops at the same step on all
    ranks. The options, and the errors of making one, are those of `StopPoint`."""

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        super().__init__(format="fabric", **options)
        self._fabric = fabric
        self._objects: dict[str, Any] | None = None  # by name; None before `load`

    def load(self, **objects: Any) -> int:
        """Name the objects that a checkpoint holds, and load them from the newest checkpoint that
        verifies; return the number of steps done, 0 without a checkpoint.

        All ranks call it after ``fabric.setup``. `objects` have a ``state_dict``: the model, the
        optimizer, a scheduler. Fabric's scaler of gradients is added as ``precision``. First it
        fixes the order of DDP's sums, which sets the gradients to None (`fix_order_of_sums`). The
        generators of random numbers are restored before the next batch of `batches`.

        Raises
        ------
        UsageError
            an object without ``state_dict`` and ``load_state_dict``, or a data loader; or as
            `StopPoint.latest`
        HpcDdpError
            as `StopPoint.latest`
        RuntimeError
            a peer is gone

        Errors of ``fabric.load`` and ``torch.load`` come through.
        """
        for name, entry in objects.items():
            # Fabric's loader has the script's as `_dataloader`.
            if isinstance(getattr(entry, "_dataloader", entry), DataLoader):
                raise UsageError(
                    f"stop.load({name}=…) is a data loader; accepted: objects without data, since"
                    " stop.batches already skips what is done",
                    hint=f"leave {name} out",
                )
            if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
                raise UsageError(
                    f"stop.load({name}=…) is a {type(entry).__name__}; accepted: objects with"
                    " state_dict and load_state_dict, each by a name of its own",
                    hint="plain values: stop.facts",
                )
        precision: Any = self._fabric.strategy.precision
        if getattr(precision, "scaler", None) is not None:  # of float16
            objects.setdefault("precision", precision)
        self._objects = objects
        models = (model for model in objects.values() if isinstance(model, torch.nn.Module))
        self.fix_order_of_sums(models)
        if folder := self.latest():
            options: dict[str, Any] = {}
            if "weights_only" in signature(self._fabric.load).parameters:
                options["weights_only"] = False  # the files' owner has been checked
            self._fabric.load(folder / STATE, dict(objects), **options)
            self._load_random(folder)
        return self.position.step

    def _batches_left(self, loader: Any, epoch: int, done: int) -> Iterator[Any]:
        """Yield the batches behind the first `done` ones. The first `done` are read again and
        dropped, so that random numbers of the data go on as well."""
        self._restore_order(find_generators_of_loader(loader), done)
        vars(loader)["_num_iter_calls"] = epoch  # from which Fabric's loader has its order
        batches = iter(loader)
        for _ in range(done):
            next(batches, None)  # a data set may have become smaller
        self._restore_random()  # before the next batch is read
        yield from batches

    def save(self, **values: Any) -> None:
        """End an optimizer step, within a loop over `batches`; save if that is due, and stop where
        the ranks are to, by SystemExit with 0. All ranks call it. `values` as in `step`,
        without ``epoch``, which is that of `batches`.

        Raises as `step` and `checkpoint`; UsageError before `load` and outside of `batches`. Errors
        of ``fabric.save`` and ``torch.save`` come through.
        """
        if self._objects is None:
            raise UsageError(
                "stop.save was called before stop.load, which names what a checkpoint holds",
                hint="stop.load(model=model, optimizer=optimizer)",
            )
        self._check_within()
        self._warn_of_others(self._objects.values(), "name it in stop.load(…)")
        if self.step(epoch=self._own_facts["epoch"], **values):
            with self.checkpoint() as folder:
                self._fabric.save(folder / STATE, self._objects)
                self._save_random(folder)

    @property
    def _devices(self) -> list[torch.device]:
        return [self._fabric.device]
