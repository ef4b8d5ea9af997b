"""The Trainer of PyTorch Lightning; `fabric` is for a loop with Fabric.

::

    trainer = Trainer(num_nodes=2, devices=4)
    fit(trainer, model, loader)

is the same as, where the callback is made before a long preparation of the data::

    trainer = Trainer(callbacks=[stop := StopCallback()], num_nodes=2, devices=4)
    trainer.fit(model, loader, ckpt_path=stop.latest(trainer))
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.stop_point import StopPoint, check_step, fix_order_of_sums
from hpc_ddp.training.process.hang_watchdog import beat
from hpc_ddp.training.stops.signals import SIGNALS

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:  # the same library by its older name: a Trainer takes callbacks of its own package only
    from pytorch_lightning import Callback, LightningModule, Trainer

FILE = "lightning.ckpt"
MOST_ARGS = 4  # of Trainer.fit, without ckpt_path


def fit(trainer: Trainer, *args: Any, stop: StopCallback | None = None, **kwargs: Any) -> None:
    """Call ``trainer.fit`` with the other arguments, from the newest checkpoint on; stop and save
    as `stop` does, the Trainer's `StopCallback`, or a new one. All ranks call it. Raises as
    `StopCallback.latest`, and UsageError for a ``ckpt_path``."""
    if kwargs.get("ckpt_path") is not None or len(args) > MOST_ARGS:
        raise UsageError(
            "fit was called with a ckpt_path; accepted: none, since the run's own is loaded",
            hint="load pretrained weights into the model, before fit",
        )
    callbacks = vars(trainer)["callbacks"]
    stops = [callback for callback in callbacks if isinstance(callback, StopCallback)]
    stop = stop or next(iter(stops), None) or StopCallback()
    if stop not in stops:
        callbacks.insert(0, stop)
    kwargs["ckpt_path"] = stop.latest(trainer)
    if "weights_only" in signature(trainer.fit).parameters:
        kwargs.setdefault("weights_only", False)  # hyperparameters; the files' owner is checked
    trainer.fit(*args, **kwargs)


class StopCallback(Callback):
    """Saves into the run's folder, and stops at the same step on all ranks.

    Lightning's own ModelCheckpoint is independent of it. The options are those of `StopPoint`.
    """

    def __init__(self, **options: Any) -> None:
        self._stop = StopPoint(format="lightning", **options)
        self._total_steps: int | None = None
        self._is_due = False  # a save comes before the next batch
        self._loaders: list[dict[str, Any]] = []  # their states, as a batch ended

    def latest(self, trainer: Trainer) -> str | None:
        """Return the newest checkpoint that verifies, for ``fit(ckpt_path=…)``; None without any.
        All ranks call it, and so meet.

        Raises
        ------
        UsageError
            `trainer` is to start its other ranks itself; or as `StopPoint.latest`
        HpcDdpError
            as `StopPoint.latest`
        """
        if trainer.world_size > 1:
            if "RANK" not in os.environ:
                raise UsageError(
                    f"the Trainer is to start {trainer.world_size} ranks itself; accepted: one,"
                    " or as many as a launcher has started",
                    hint="start the script with hpc-ddp or torchrun",
                )
            trainer.strategy.setup_environment()  # the process group; `fit` finds it there
        folder = self._stop.latest()
        return None if folder is None else str(folder / FILE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's handler of SIGTERM broadcasts, and ranks are signalled in different steps.
        self._stop.take_signals()
        fix_order_of_sums([trainer.strategy.model or pl_module])
        self._stop.begin()
        check_step(
            self._stop, trainer.global_step, "trainer.fit(…, ckpt_path=stop.latest(trainer))"
        )
        # A checkpoint counts the batch as ready before which it was saved, and which comes again.
        batches = trainer.fit_loop.epoch_loop.batch_progress.total
        batches.ready = batches.completed
        steps = trainer.estimated_stepping_batches
        self._total_steps = int(steps) if math.isfinite(steps) else None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._stop.position.step:
            beat()
            return  # within an accumulation
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        batch_size = getattr(trainer.train_dataloader, "batch_size", None) or 0
        self._is_due = self._stop.step(
            trainer.global_step,
            epoch=trainer.current_epoch,
            total_steps=self._total_steps,
            samples=batch_size * trainer.world_size * trainer.accumulate_grad_batches,
            wait_for_all=batch_idx + 2 == trainer.num_training_batches,
            loss=loss,
        )
        if self._is_due and (loader := _loader(trainer)):
            self._loaders = loader._state_dicts()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The hooks of the module and of all callbacks have ended the last batch by now, and with an
        # epoch its validation. Not at the start of the epoch: what Lightning saves there skips a
        # batch, or an epoch. A loader's state at the end of an epoch would skip the next one.
        waits = batch_idx == 0 and self._loaders and trainer.num_training_batches > 1
        if self._is_due and not waits:
            self._is_due = False
            self._save(trainer)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        beat()

    def _save(self, trainer: Trainer) -> None:
        """Save all that was done before this batch. Raises as `StopPoint.checkpoint`."""
        with self._stop.checkpoint() as folder, self._before_batch(trainer):
            trainer.save_checkpoint(folder / FILE)

    @contextmanager
    def _before_batch(self, trainer: Trainer) -> Iterator[None]:
        """Have Lightning save the loaders as they were before this batch was fetched."""
        loader = _loader(trainer)
        if loader and self._loaders:
            vars(loader)["_state_dicts"] = lambda: self._loaders
        try:
            yield
        finally:
            if loader:
                vars(loader).pop("_state_dicts", None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop.finish()
        connector = getattr(trainer, "_signal_connector", None)
        handlers = getattr(connector, "_original_handlers", {})
        for number in SIGNALS:  # else Lightning puts back the run's, which do nothing any more
            handlers.pop(number, None)


def _loader(trainer: Trainer) -> Any:
    """Return what holds the training's loaders; None for a Lightning that names it otherwise."""
    return getattr(trainer.fit_loop, "_combined_loader", None)
