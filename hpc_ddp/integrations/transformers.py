"""The Trainer of Hugging Face Transformers.

::

    trainer = Trainer(model, args, train_dataset=data)
    train(trainer)

is the same as, where the callback is made before a long preparation of the data::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[stop := StopCallback()])
    trainer.train(resume_from_checkpoint=stop.latest(trainer))
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.epochs import (
    RANDOM,
    drop_iterator,
    find_generators_of_loader,
    put_states,
    states_of,
)
from hpc_ddp.integrations.stop_point import StopPoint, check_step, warn_of_ranks
from hpc_ddp.training.data.iterable import set_epoch
from hpc_ddp.training.process.hang_watchdog import beat
from hpc_ddp.training.telemetry.metrics import RESERVED


def train(trainer: Trainer, **options: Any) -> Any:
    """Train from the newest checkpoint on, and return what ``trainer.train`` returns; all ranks
    call it. The Trainer's `StopCallback` stops and saves. Where it has none, one with `options` is
    added; else `options` have no effect.

    Raises as `StopPoint`, and as `StopPoint.latest`; errors of the training come through, also
    SystemExit (code 0) at a stop.
    """
    callbacks = trainer.callback_handler.callbacks
    stop = next((entry for entry in callbacks if isinstance(entry, StopCallback)), None)
    if stop is None:
        stop = StopCallback(**options)
        trainer.add_callback(stop)
    return trainer.train(resume_from_checkpoint=stop.latest(trainer))


class StopCallback(TrainerCallback):
    """Has the Trainer save into the run's folder, and stop at the same step on all ranks.

    It saves as the next step begins: all that the Trainer does after a step, such as an evaluation
    and a checkpoint of its own, is done by then. The Trainer's own checkpoints stay where
    ``output_dir`` says. The options, and the errors of making one, are those of `StopPoint`. The
    loss in the journal is that of the Trainer's last log (``logging_steps``).
    """

    def __init__(self, **options: Any) -> None:
        """Take over the signals of the process, as `StopPoint` does."""
        self._stop = StopPoint(format="transformers", **options)
        ranks = range(self._stop._info.world_size)
        self._stop._own_names = frozenset(RANDOM.format(rank) for rank in ranks)
        self._is_due = False  # the next step or epoch begins with a save
        self._states: dict[str, Any] = {}  # of the generators, as the epoch began
        self._saved_states: dict[str, Any] | None = None  # the same, of the checkpoint
        self._values: dict[str, float] = {}  # of the Trainer's last logs, for the journal
        self._trainer: Trainer | None = None  # that of `latest`

    def latest(self, trainer: Trainer) -> str | None:
        """Return the folder of the newest checkpoint that verifies, for
        ``train(resume_from_checkpoint=…)`` of this `trainer`; None without any. All ranks call it,
        before ``train``.

        With a checkpoint it sets ``restore_callback_states_from_checkpoint`` of the Trainer's
        arguments, and reads the states of this rank's generators, if as many ranks have saved it,
        for `on_epoch_begin`. Raises as `StopPoint.latest`.
        """
        self._trainer = trainer
        folder = self._stop.latest()
        if folder is None:
            return None
        # Without it an EarlyStoppingCallback would have all its patience again.
        trainer.args.restore_callback_states_from_checkpoint = True
        if self._stop.facts["ranks"] == trainer.args.world_size:
            path = folder / RANDOM.format(self._stop.rank)
            self._saved_states = torch.load(path, weights_only=True)
        return str(next(folder.glob("checkpoint-*")))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **values: Any
    ) -> None:
        """Begin the training in the run, and fix the order of DDP's sums; another number of ranks
        than before gets a warning. All ranks call it. Raise UsageError before `latest`, for a
        loader that can't skip what is done, and as `check_step`; raises as `StopPoint.begin`."""
        if self._trainer is None:
            raise UsageError(
                "the training begins before stop.latest, which finds the run's newest checkpoint",
                hint="trainer.train(resume_from_checkpoint=stop.latest(trainer))",
            )
        _check_loader(values.get("train_dataloader"), args.world_size)
        self._stop.fix_order_of_sums([self._trainer.model_wrapped])
        self._stop.begin()
        check_step(self._stop, state.global_step, "train(trainer)")
        warn_of_ranks(self._stop, args.world_size)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **values: Any
    ) -> None:
        """End the loader's persistent workers, put the generators into the states with which a
        resumed epoch began, tell the samplers their epoch, and save if that is due. Raises as
        `_save_if_due`."""
        loader = values.get("train_dataloader")
        drop_iterator(loader)
        generators, devices = find_generators_of_loader(loader), [args.device]
        if self._saved_states is not None:  # the Trainer restores them later: the order is drawn
            put_states(self._saved_states, generators, devices)
            self._saved_states = None
        _set_epochs(loader, math.floor(state.epoch or 0))
        self._states = states_of(generators, devices)
        self._save_if_due(args)  # before the order of this epoch is drawn

    def on_step_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Save if that is due. Raises as `_save_if_due`."""
        self._save_if_due(args)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Keep the numbers in the Trainer's logs for the journal, which gets them as the next step
        ends, and tell the watchdog that the process does not hang."""
        beat()
        numbers = {
            name: entry
            for name, entry in (logs or {}).items()
            if name not in RESERVED and isinstance(entry, (int, float))
        }
        self._values |= numbers

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Tell the watchdog that the process does not hang."""
        beat()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End the step, and note whether a save is due. Raises as `StopPoint.step`."""
        batch_size = args.train_batch_size * args.gradient_accumulation_steps
        self._is_due = self._stop.step(
            state.global_step,
            epoch=math.floor(state.epoch or 0),
            total_steps=state.max_steps,
            samples=batch_size * args.world_size,
            wait_for_all=_is_long_step(args, state, state.global_step + 1),
            **self._values,
        )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the training, as `StopPoint.finish` does."""
        self._stop.finish()

    def _save_if_due(self, args: TrainingArguments) -> None:
        """Have the Trainer save into the run's folder, if that is due, and stop where the ranks are
        to. During the save some of `args` have other values than for a checkpoint of the Trainer's
        own. Raises as `StopPoint.checkpoint`; errors of the Trainer's save come through."""
        if not self._is_due or self._trainer is None:
            return
        self._is_due = False
        with self._stop.checkpoint() as folder:
            torch.save(self._states, folder / RANDOM.format(self._stop.rank))
            replacement = {
                "output_dir": str(folder),
                "save_only_model": False,  # without the optimizer no training goes on
                "save_strategy": "no",  # else it were taken for the folder of the best model
                "push_to_hub": False,
            }
            script_values = {name: getattr(args, name) for name in replacement}
            vars(args).update(replacement)
            try:
                self._trainer._save_checkpoint(self._trainer.model_wrapped, None)
            finally:
                vars(args).update(script_values)


def _check_loader(loader: Any, ranks: int) -> None:
    """Raise UsageError for a loader on several ranks that can't skip what is done: that of
    ``dispatch_batches``, unless it reads a stream, or splits batches of which none is short.

    With ``dispatch_batches`` rank 0 reads a batch for each rank, while a resumed Trainer skips one
    batch for all of them. With ``split_batches``, too, the Trainer skips the right batches, but
    fills a short last batch from the first batch behind the skipped ones.
    """
    if (
        not isinstance(loader, DataLoaderDispatcher)
        or isinstance(loader.dataset, IterableDataset)
        or ranks == 1
    ):
        return
    is_even = loader._drop_last or len(loader.dataset) % ranks == 0
    if not (loader.split_batches and is_even):
        raise UsageError(
            "dispatch_batches is True, and a resumed Trainer then repeats samples of such a data"
            f" set; accepted: False, or True with split_batches and a multiple of {ranks} samples"
            " (or dataloader_drop_last)",
            hint='TrainingArguments(…, accelerator_config={"dispatch_batches": False})',
        )


def _set_epochs(loader: Any, epoch: int) -> None:
    """Tell the loader's samplers their epoch, from which they draw their order. The Trainer tells
    them, too, but not in a resumed epoch: there it tells only those of a new loader around this
    one, which skips what is done."""
    shard = getattr(loader, "batch_sampler", None)
    set_epoch(loader, epoch)
    set_epoch(getattr(shard, "batch_sampler", None), epoch)


def _is_long_step(args: TrainingArguments, state: TrainerState, step: int) -> bool:
    """Return whether the Trainer evaluates or saves after `step`, as far as is known before it: a
    stop at that step would come only after the evaluation or save."""
    intervals = [0]
    if args.eval_strategy == "steps":
        intervals.append(state.eval_steps)
    if args.save_strategy == "steps":
        intervals.append(state.save_steps)
    if "epoch" in (args.eval_strategy, args.save_strategy) and state.epoch:
        # Of steps that accumulate batches the last one of an epoch may have fewer.
        intervals.append(math.ceil(state.global_step / state.epoch - 1e-6))
    return any(every > 0 and step % every == 0 for every in intervals)
