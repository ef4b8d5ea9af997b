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
from contextlib import ExitStack
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hpc_ddp.integrations.stop_point import (
    StopPoint,
    check_step,
    fix_order_of_sums,
    warn_of_ranks,
)
from hpc_ddp.training.process.hang_watchdog import beat
from hpc_ddp.training.telemetry.metrics import TAKEN

_REPLACED = ("output_dir", "save_only_model")  # arguments that differ for a save of the run


def train(trainer: Trainer, **options: Any) -> Any:
    """Train from the newest checkpoint on, and return what ``trainer.train`` returns; stop and save
    as the Trainer's `StopCallback` does, or a new one with these options. All ranks call it. Raises
    as `StopPoint.latest`."""
    callbacks = trainer.callback_handler.callbacks
    stop = next((entry for entry in callbacks if isinstance(entry, StopCallback)), None)
    if stop is None:
        stop = StopCallback(**options)
        trainer.add_callback(stop)
    return trainer.train(resume_from_checkpoint=stop.latest(trainer))


class StopCallback(TrainerCallback):
    """Has the Trainer save into the run's folder, and stop at the same step on all ranks.

    The Trainer's own checkpoints (``save_steps``) stay where ``output_dir`` says; the argument
    ``save_only_model`` holds for these alone. The options are those of `StopPoint`. The loss in the
    journal is that of the Trainer's last log (``logging_steps``).
    """

    def __init__(self, **options: Any) -> None:
        self._stop = StopPoint(format="transformers", **options)
        self._saving = ExitStack()  # the checkpoint that the Trainer is about to write
        self._script_args: dict[str, Any] = {}  # the script's values, while others hold for a save
        self._is_due = False  # a save of the run is
        self._was_busy = False  # a save was put off in the step before
        self._values: dict[str, float] = {}
        self._trainer: Trainer | None = None

    def latest(self, trainer: Trainer) -> str | None:
        """Return the folder of the newest checkpoint that verifies, for
        ``train(resume_from_checkpoint=…)`` of this `trainer`; None without any. All ranks call it.
        Raises as `StopPoint.latest`."""
        self._trainer = trainer
        folder = self._stop.latest()
        return None if folder is None else str(next(folder.glob("checkpoint-*")))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._trainer is not None:
            fix_order_of_sums([self._trainer.model_wrapped])
        self._stop.begin()
        check_step(self._stop, state.global_step, "train(trainer)")
        warn_of_ranks(self._stop, args.world_size)

    def on_step_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._take_back(args)  # the Trainer has changed its mind, as for the best model only

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        beat()
        numbers = {
            name: entry
            for name, entry in (logs or {}).items()
            if name not in TAKEN and isinstance(entry, (int, float))
        }
        self._values |= numbers

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        beat()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        batch_size = args.train_batch_size * args.gradient_accumulation_steps
        self._is_due = self._stop.step(
            state.global_step,
            epoch=math.floor(state.epoch or 0),
            total_steps=state.max_steps,
            samples=batch_size * args.world_size,
            wait_for_all=_is_long_step(args, state, state.global_step + 1),
            **self._values,
        )
        if not _ends_epoch(state):  # else all that comes with the end of the epoch is done first
            self._save_if_free(args, control)
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if _ends_epoch(state):
            self._save_if_free(args, control)
        return control

    def _save_if_free(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Have the Trainer save into the run's folder, if that is due.

        A save of the script's own, or an evaluation, which may decide on one or on the end of the
        training, comes first, and the run's after the next step. Where that is such a step too,
        the Trainer evaluates, and then saves for the run, in place of a save of the script's own.
        """
        is_busy = control.should_save or control.should_evaluate
        waits, self._was_busy = is_busy and not self._was_busy, self._is_due and is_busy
        if self._is_due and not waits and not control.should_training_stop:
            self._script_args = {name: getattr(args, name) for name in _REPLACED}
            args.output_dir = str(self._saving.enter_context(self._stop.checkpoint()))
            args.save_only_model = False  # without the optimizer no training goes on
            control.should_save = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if control.should_training_stop:  # by the evaluation: a resumed Trainer would go on
            self._take_back(args)
        elif self._put_back(args):
            self._is_due = False
            self._saving.close()

    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._take_back(args)
        self._stop.finish()

    def _take_back(self, args: TrainingArguments) -> None:
        """Give up a checkpoint that the Trainer has not written; the next step's is due again."""
        if self._put_back(args):
            self._saving = ExitStack()

    def _put_back(self, args: TrainingArguments) -> bool:
        """Give the arguments the script's values again; return whether they had others."""
        was_replaced = bool(self._script_args)
        vars(args).update(self._script_args)
        self._script_args = {}
        return was_replaced


def _ends_epoch(state: TrainerState) -> bool:
    """Return whether the last step was the last one of its epoch."""
    return float(state.epoch or 0.5).is_integer()


def _is_long_step(args: TrainingArguments, state: TrainerState, step: int) -> bool:
    """Return whether the script evaluates after `step`, or saves after it as the last one of its
    epoch, as far as is known before it: a stop that falls there would have to wait."""
    every = state.eval_steps if args.eval_strategy == "steps" else 0
    if "epoch" in (args.eval_strategy, args.save_strategy) and state.epoch:
        # Of steps that accumulate batches the last one of an epoch may have fewer.
        every = math.ceil(state.global_step / state.epoch - 1e-6)
    return every > 0 and step % every == 0
