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
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.stop_point import StopPoint, check_step, warn_of_ranks
from hpc_ddp.training.data.iterable import set_epoch
from hpc_ddp.training.devices import is_number
from hpc_ddp.training.process.hang_watchdog import beat
from hpc_ddp.training.stops.signals import SIGNALS

# The library has two names. A Trainer of either one takes this callback, but only the package that
# the script imports may be there; it may be imported behind this module.
_IS_OLDER = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
if TYPE_CHECKING or not (_IS_OLDER or find_spec("lightning") is None):
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    from pytorch_lightning import Callback, LightningModule, Trainer

# Names of classes of either package. These load a checkpoint of their own over the run's.
FINDERS = {"LearningRateFinder", "BatchSizeFinder"}
# At the start of an epoch they set what their checkpoint does not have; a second call changes
# nothing.
SET_AT_EPOCH_START = {"GradientAccumulationScheduler", "StochasticWeightAveraging"}
FILE = "lightning.ckpt"
FROZEN = "hpc_ddp_frozen"  # in a checkpoint
MOST_ARGS = 4  # of Trainer.fit, without ckpt_path


def fit(trainer: Trainer, *args: Any, stop: StopCallback | None = None, **kwargs: Any) -> None:
    """Call ``trainer.fit`` with the other arguments, from the newest checkpoint on.

    `stop` saves and stops; without it the StopCallback among the Trainer's callbacks does, or a new
    one, made here. `stop` or the new one is added to the callbacks, and stays there.
    ``weights_only`` is False unless it is given. All ranks call it. Errors of the training come
    through, also SystemExit (code 0) at a stop.

    Raises
    ------
    UsageError
        a ``ckpt_path``, a second StopCallback; or as `StopPoint` or `StopCallback.latest`
    HpcDdpError, RuntimeError
        as `StopCallback.latest`
    """
    if kwargs.get("ckpt_path") is not None or len(args) > MOST_ARGS:
        raise UsageError(
            "fit was called with a ckpt_path; accepted: none, since the run's own is loaded",
            hint="load pretrained weights into the model, before fit",
        )
    callbacks = vars(trainer)["callbacks"]
    stops = [callback for callback in callbacks if isinstance(callback, StopCallback)]
    stop = stop or next(iter(stops), None) or StopCallback()
    if {*stops} - {stop}:
        raise UsageError(
            "the Trainer has another StopCallback; accepted: one in all",
            hint="Trainer(callbacks=[stop]), and fit(trainer, model) without stop=…",
        )
    if stop not in stops:
        callbacks.insert(0, stop)
    kwargs["ckpt_path"] = stop.latest(trainer)
    if "weights_only" in signature(trainer.fit).parameters:
        kwargs.setdefault("weights_only", False)  # hyperparameters; the files' owner is checked
    trainer.fit(*args, **kwargs)


class StopCallback(Callback):
    """Saves into the run's folder, and stops at the same step on all ranks.

    Lightning's own ModelCheckpoint is independent of it. The options, and the errors of making one,
    are those of `StopPoint`; it takes over the signals of the process.
    """

    def __init__(self, **options: Any) -> None:
        self._stop = StopPoint(format="lightning", **options)
        self._total_steps: int | None = None
        self._is_due = False  # True if a save comes before one of the next batches
        self._is_amid = False  # True while batches add up the gradients of a step
        self._frozen: dict[str, list[str]] | None = None  # of the loaded checkpoint
        self._states: dict[int, Any] = {}  # of the loaders, by the next batch's index; or None

    def latest(self, trainer: Trainer) -> str | None:
        """Return the path of the newest checkpoint that verifies, for ``trainer.fit(ckpt_path=…)``;
        None without any. All ranks call it. With several ranks the Trainer makes the process group.

        Raises
        ------
        UsageError
            `trainer` is to start its other ranks itself; or as `StopPoint.latest`
        HpcDdpError, RuntimeError
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

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise UsageError for a callback that loads a checkpoint of its own over the run's; and,
        as `stage` is ``fit``, for saves that a thread writes: the run has to know when a file is
        whole. For ``fit`` convert the module here: Lightning's conversion after the restore would
        round the weights."""
        writer = getattr(trainer.strategy, "checkpoint_io", None)
        while writer is not None and not _is_one_of(writer, {"AsyncCheckpointIO"}):
            writer = getattr(writer, "checkpoint_io", None)  # the one that it wraps
        if stage == "fit" and writer is not None:
            raise UsageError(
                "the Trainer has an AsyncCheckpointIO, which still writes a save that is published",
                hint="remove it from the plugins",
            )
        if stage == "fit" and trainer.precision_plugin.precision == "64-true":
            trainer.precision_plugin.convert_module(pl_module)
        for callback in vars(trainer)["callbacks"]:
            if _is_one_of(callback, FINDERS):
                name = type(callback).__name__
                raise UsageError(
                    f"a {name} is among the callbacks, and loads its own checkpoint over the run's",
                    hint=f"remove the {name}; call lightning.pytorch.tuner.Tuner before fit",
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have Lightning tell the samplers their epoch before it loads the loaders' states."""
        loop: Any = trainer.fit_loop
        load_states = partial(_load_states, loop, loop._load_combined_loader_states)
        vars(loop)["_load_combined_loader_states"] = load_states

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the training in the run, take the signals back from Lightning, fix the order of
        DDP's sums, freeze again what the checkpoint has as frozen, and correct Lightning's counters
        and hooks for a save between two batches. Another number of ranks than before gets a
        warning; all ranks call it.

        Raises as `StopPoint.begin` and `check_step`; UsageError for a loader whose order a resume
        would not find again.
        """
        # Lightning's handler of SIGTERM broadcasts, and ranks are signalled in different steps.
        self._stop.take_signals()
        self._stop.fix_order_of_sums([trainer.strategy.model or pl_module])
        self._stop.begin()
        call = "trainer.fit(…, ckpt_path=stop.latest(trainer))"
        check_step(self._stop, trainer.global_step, call)
        warn_of_ranks(self._stop, trainer.world_size)
        _check_samplers(trainer.fit_loop)
        _load_late_states(trainer.fit_loop)
        self._mend_epoch_loop(trainer, trainer.fit_loop.epoch_loop)
        steps = trainer.estimated_stepping_batches
        self._total_steps = int(steps) if math.isfinite(steps) else None
        if self._frozen is not None:
            _freeze_again(pl_module, self._frozen)
        if trainer.fit_loop.restarted_mid_epoch:
            start_epoch = partial(_start_epoch_again, trainer, trainer.fit_loop.on_advance_start)
            vars(trainer.fit_loop)["on_advance_start"] = start_epoch

    def _mend_epoch_loop(self, trainer: Trainer, loop: Any) -> None:
        """Correct Lightning's counters for a save between two batches, and have the `loop` over an
        epoch's batches call `_before_fetch`."""
        # A checkpoint counts the batch as ready before which it was saved, and which comes again.
        for progress in (loop.batch_progress.total, loop.batch_progress.current):
            progress.ready = progress.completed
        # Lightning adds the step of a save that comes before it counts: this save comes behind.
        loop._batches_that_stepped -= loop.restarting
        vars(loop)["_on_before_fetch"] = partial(self._before_fetch, trainer, loop._on_before_fetch)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the names of what is frozen to a checkpoint, under `FROZEN`."""
        checkpoint[FROZEN] = _names_of_frozen(pl_module)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the checkpoint's names of what is frozen, for `on_train_start`."""
        self._frozen = checkpoint.get(FROZEN)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the epoch's fetcher call `_before_fetch` before its first batch, too."""
        # A loader that is made anew for the epoch has a new fetcher, which fetches before it
        # learns of the hook.
        fetcher: Any = trainer.fit_loop._data_fetcher
        fetcher._start_profiler = trainer.fit_loop.epoch_loop._on_before_fetch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the samplers' counts, and let Lightning step a ReduceLROnPlateau in a resumed epoch
        if all the metrics that it needs are there."""
        # torchdata's sampler with a state keeps the count of the last epoch until its first sample:
        # a checkpoint from before this sample would begin at the end of the new epoch.
        for sampler in _samplers_of(trainer.fit_loop):
            if hasattr(sampler, "yielded"):
                sampler.yielded = 0
        # Lightning steps no ReduceLROnPlateau at the end of a resumed epoch, whose metrics may be
        # from before the stop, and missing. Metrics that are there are from after it.
        configs = trainer.lr_scheduler_configs
        monitors = {config.monitor for config in configs if config.reduce_on_plateau}
        if monitors <= set(trainer.callback_metrics):
            vars(trainer.fit_loop)["_restarting"] = False

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """End the step, if the batch has ended one, and note whether a save is due; all ranks call
        it. Raises as `StopPoint.step`."""
        self._is_amid = trainer.global_step == self._stop.position.step  # the batch ended no step
        if self._is_amid:
            beat()
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        batch_size = getattr(trainer.train_dataloader, "batch_size", None) or 0
        self._is_due = self._stop.step(
            trainer.global_step,
            epoch=trainer.current_epoch,
            total_steps=self._total_steps,
            samples=batch_size * trainer.world_size * trainer.accumulate_grad_batches,
            wait_for_all=_is_before_long_step(trainer, batch_idx),
            loss=loss if is_number(loss) else None,  # or images, with manual optimization
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is due, the last batch has ended a step, and the loaders' states before it
        are kept; stop where the ranks are to. A collective. Raises as `StopPoint.checkpoint`."""
        # The hooks of the module and of all callbacks have ended the last batch by now, and with an
        # epoch its validation. Not at the start of the epoch: what Lightning saves there skips a
        # batch, or an epoch.
        fetcher: Any = trainer.fit_loop._data_fetcher
        index = trainer.fit_loop.epoch_loop.batch_idx
        if fetcher.fetched == index:  # the module's training_step fetches this batch by itself
            self._keep_states(fetcher)
        states = self._states.pop(index, None)
        if self._is_due and not self._is_amid and states is not None:
            self._is_due = False
            self._states.clear()
            with self._stop.checkpoint() as folder, _replace_states(trainer, states):
                trainer.save_checkpoint(folder / FILE)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Tell the watchdog that the process does not hang."""
        beat()

    def _before_fetch(self, trainer: Trainer, start_profiler: Callable[[], None]) -> None:
        """Keep the loaders' states, if a save is due, then call the hook that Lightning calls
        before it fetches a batch."""
        self._keep_states(trainer.fit_loop._data_fetcher)
        start_profiler()

    def _keep_states(self, fetcher: Any) -> None:
        """Keep the states of the loaders before the next batch is fetched, if a save is due.

        From a loader without a length Lightning has by then fetched one batch ahead. No states were
        kept for that batch, so the save comes one batch later. Keeping the states before every
        batch would cost too much: they may hold a buffer of samples.
        """
        loader = fetcher.combined_loader
        self._states[fetcher.fetched] = deepcopy(loader._state_dicts()) if self._is_due else None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the training, as `StopPoint.finish` does, and keep Lightning from changing the
        signals."""
        self._stop.finish()
        connector = getattr(trainer, "_signal_connector", None)
        handlers = getattr(connector, "_original_handlers", {})
        for number in SIGNALS:  # else Lightning puts back the run's, which do nothing any more
            handlers.pop(number, None)


def _samplers_of(loop: Any) -> list[Any]:
    """Return the samplers of the training's loaders with a ``state_dict``, and those of the
    loaders' batch samplers, where Lightning puts its own."""
    loaders = [entry for entry in loop._combined_loader.flattened if hasattr(entry, "state_dict")]
    parts = [part for entry in loaders for part in (entry, getattr(entry, "batch_sampler", None))]
    samplers = [getattr(part, "sampler", None) for part in parts]
    return [sampler for sampler in samplers if sampler is not None]


def _check_samplers(loop: Any) -> None:
    """Raise UsageError where Lightning has wrapped the sampler of a loader with a state, for
    several ranks or for one under ``strategy="ddp"``: the wrapper has no state, and a resume would
    skip batches of another order."""
    if "DistributedSamplerWrapper" in {type(sampler).__name__ for sampler in _samplers_of(loop)}:
        raise UsageError(
            "a StatefulDataLoader has shuffle=True or a sampler of its own under a strategy of"
            " several ranks, and a resume does not find its order again; accepted: a"
            " DistributedSampler",
            hint="StatefulDataLoader(…, sampler=DistributedSampler(data, shuffle=True))",
        )


def _names_of_frozen(module: LightningModule) -> dict[str, list[str]]:
    """Return the names of the parameters that get no gradient, and of the BatchNorms that keep
    their statistics: a callback such as BaseFinetuning sets both, and its checkpoint has neither.
    """
    weights = [name for name, weight in module.named_parameters() if not weight.requires_grad]
    norms = [
        name
        for name, part in module.named_modules()
        if not getattr(part, "track_running_stats", True)
    ]
    return {"parameters": weights, "norms": norms}


def _freeze_again(module: LightningModule, frozen: dict[str, list[str]]) -> None:
    """Freeze the parameters and BatchNorms that `frozen` names, and unfreeze all others."""
    for name, weight in module.named_parameters():
        weight.requires_grad_(name not in frozen["parameters"])
    for name, part in module.named_modules():
        if hasattr(part, "track_running_stats"):
            part.track_running_stats = name not in frozen["norms"]


def _start_epoch_again(trainer: Trainer, start_epoch: Callable[[], None]) -> None:
    """Begin the rest of a resumed epoch by `start_epoch`, once, and call the hook of an epoch's
    start for the callbacks that need it (`SET_AT_EPOCH_START`): Lightning calls it for none."""
    del vars(trainer.fit_loop)["on_advance_start"]  # this function, in place of the method
    start_epoch()
    for callback in vars(trainer)["callbacks"]:
        if _is_one_of(callback, SET_AT_EPOCH_START):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def _load_late_states(loop: Any) -> None:
    """Have Lightning load the loaders' states, if it has made the loaders before it read the
    checkpoint: where ``configure_optimizers`` reads ``trainer.estimated_stepping_batches``."""
    if loop._combined_loader_states_to_load:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)


@contextmanager
def _replace_states(trainer: Trainer, states: list[dict[str, Any]]) -> Iterator[None]:
    """Have Lightning save `states` of the loaders, in the block, instead of the present ones."""
    loader = vars(trainer.fit_loop)["_combined_loader"]
    vars(loader)["_state_dicts"] = lambda: states
    try:
        yield
    finally:
        del vars(loader)["_state_dicts"]


def _load_states(loop: Any, load_states: Callable[[], None]) -> None:
    """Tell the samplers their epoch, and have Lightning load the states of the loaders, by
    `load_states`.

    A loader with a state takes the order of its epoch as it is loaded; Lightning itself tells the
    samplers later, and the rest of the epoch would be in the order of the first one.
    """
    for sampler in _samplers_of(loop):
        set_epoch(sampler, loop.epoch_progress.current.processed)
    load_states()


def _is_one_of(callback: object, names: Set[str]) -> bool:
    """Return whether an object is of a class with one of the `names`, or of one derived from it."""
    return any(kind.__name__ in names for kind in type(callback).__mro__)


def _is_before_long_step(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether the step that follows the batch `batch_idx` of an epoch ends the epoch, or has
    a validation after it: a stop at that step would come only after the validation."""
    batches = trainer.accumulate_grad_batches  # of the next step
    if batch_idx + 1 + batches >= trainer.num_training_batches:
        return True
    every = getattr(trainer, "val_check_batch", None)
    if not isinstance(every, int) or every < 1:  # infinity: at the epoch's end
        return False
    over_epochs = trainer.check_val_every_n_epoch is None
    done = 1 + (trainer.fit_loop.total_batch_idx if over_epochs else batch_idx)
    return (done + batches) // every > done // every
