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
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.epochs import EpochStop, find_generators_of_loader
from hpc_ddp.training.data.iterable import set_epoch

if TYPE_CHECKING:
    from accelerate import Accelerator

STATE = "state"
# The Accelerator's lists of what its checkpoints have, and words for their entries.
KINDS = {
    "_models": "models",
    "_optimizers": "optimizers",
    "_schedulers": "schedulers",
    "_custom_objects": "objects of register_for_checkpointing",
}


class Stop(EpochStop):
    """Saves the state of an Accelerator into the run's folder, and stops at the same step on all
    ranks. The options, and the errors of making one, are those of `StopPoint`; UsageError is raised
    for ``automatic_checkpoint_naming`` and ``use_stateful_dataloader``, too."""

    def __init__(self, accelerator: Accelerator, **options: Any) -> None:
        if accelerator.project_configuration.automatic_checkpoint_naming:
            raise UsageError(
                "automatic_checkpoint_naming is True, and the Accelerator then saves into a folder"
                " of its own, not into the run's; accepted: False",
                hint="ProjectConfiguration(…, automatic_checkpoint_naming=False)",
            )
        if getattr(accelerator.dataloader_config, "use_stateful_dataloader", False):
            raise UsageError(
                "use_stateful_dataloader is True, and such a loader skips by itself what"
                " stop.batches skips, too; accepted: False",
                hint="DataLoaderConfiguration(…, use_stateful_dataloader=False)",
            )
        super().__init__(format="accelerate", **options)
        self._accelerator = accelerator
        self._samples = 0  # of all ranks in a batch
        self._loaded: dict[str, int] = {}  # numbers of objects at `load`, by kind

    def load(self, *models: Any) -> int:
        """Load the newest checkpoint that verifies; return the number of steps done, 0 without one.

        All ranks call it after ``accelerator.prepare``, with the models that it returned: they are
        passed to `fix_order_of_sums`, without which a stop may change the last bits of the weights,
        from three ranks on. The generators of random numbers are restored before the next batch of
        `batches`. Raises as `StopPoint.latest`; errors of ``load_state`` come through.
        """
        self.fix_order_of_sums(models)
        self._loaded = self._count_objects()
        if folder := self.latest():
            self._accelerator.load_state(str(folder / STATE))
            self._load_random(folder)
        return self.position.step

    def _batches_left(self, loader: Any, epoch: int, done: int) -> Iterator[Any]:
        """Yield the batches behind the first `done` ones, by Accelerate's own skipping; note how
        many samples a batch has, for the journal."""
        try:
            self._samples = getattr(loader, "total_batch_size", 0)
        except TypeError:  # of a batch sampler without a size
            self._samples = 0
        set_epoch(loader, epoch)
        # The generator of a shuffle: one for all ranks, or that of the script's loader.
        shared = getattr(loader, "synchronized_generator", None)
        self._restore_order(find_generators_of_loader(loader) if shared is None else [shared], done)
        yield from self._skip(loader, done) if done else loader

    def _skip(self, loader: Any, done: int) -> Any:
        """Return an iterable over the batches of a loader behind the first `done` ones: a loader
        that skips them, with what `gather_for_metrics` reads of the original."""
        from accelerate.data_loader import DataLoaderDispatcher

        # A dispatcher can't begin behind its last batch, and fills a short one from its first one.
        if isinstance(loader, DataLoaderDispatcher):
            return islice(loader, done, None)
        resumed = self._accelerator.skip_first_batches(loader, done)
        # Without these `gather_for_metrics` counts what fills up the last batch.
        vars(resumed)["_drop_last"] = getattr(loader, "_drop_last", False)
        for kind in ("sampler", "batch_sampler"):
            sampler, skip_sampler = getattr(loader, kind, None), getattr(resumed, kind, None)
            for name in ("batch_size", "split_batches", "num_processes"):
                if (
                    skip_sampler is not None
                    and hasattr(sampler, name)
                    and not hasattr(skip_sampler, name)
                ):
                    setattr(skip_sampler, name, getattr(sampler, name))
        return resumed

    def _count_objects(self) -> dict[str, int]:
        """Return how many objects a checkpoint of the Accelerator has, by their kind."""
        return {text: len(getattr(self._accelerator, name)) for name, text in KINDS.items()}

    def save(self, **values: Any) -> None:
        """End a batch, within a loop over `batches`; save if that is due, and stop where the ranks
        are to, by SystemExit with 0. While gradients accumulate it does nothing. All ranks call it.
        `values` as in `step`.

        Raises as `step` and `checkpoint`; UsageError outside of `batches`, and for an object that
        was prepared after `load`. Errors of ``save_state`` and ``torch.save`` come through.
        """
        self._check_within()
        if not self._accelerator.sync_gradients:
            return
        self._check_objects()
        lists = (getattr(self._accelerator, name) for name in KINDS)
        objects = chain([self._accelerator.scaler], chain.from_iterable(lists))
        self._warn_of_others(objects, "accelerator.register_for_checkpointing(…) keeps it")
        samples = self._samples * self._accelerator.gradient_accumulation_steps
        if self.step(epoch=self._own_facts["epoch"], samples=samples, **values):
            with self.checkpoint() as folder:
                self._accelerator.save_state(str(folder / STATE))
                self._save_random(folder)

    def _check_objects(self) -> None:
        """Raise UsageError where an object came after `load`: a resume would begin it anew."""
        for kind, count in self._count_objects().items():
            if count > self._loaded.get(kind, count):  # before `load` nothing is counted
                raise UsageError(
                    f"the Accelerator got {kind} after stop.load, which a resume does not restore;"
                    " accepted: before it",
                    hint="accelerator.prepare(…) and register_for_checkpointing(…), then stop.load",
                )

    @property
    def _devices(self) -> list[torch.device]:
        return [self._accelerator.device]
