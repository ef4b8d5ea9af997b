"""A Trainer with a GPT-2 of random weights, dropout and shuffled data."""

import ast
import os
from pathlib import Path
from typing import Any

import torch
from common import KIND, OPTIONS, RANK, args, disturb, leave_weights
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hpc_ddp.integrations.transformers import StopCallback, train

CONFIG = GPT2Config(
    vocab_size=32,
    n_positions=16,
    n_embd=2 * args.width,
    n_layer=1,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
)

ORDERS: dict[str, dict[str, Any]] = {
    "shuffle": {},
    "lengths": {"train_sampling_strategy": "group_by_length"},
    "rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "split": {
        "accelerator_config": {"dispatch_batches": True, "split_batches": True},
        "per_device_train_batch_size": 8,  # of all ranks
    },
    "persistent": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "dispatch": {"accelerator_config": {"dispatch_batches": True}},
}


class PushingTrainer(Trainer):
    """Prints the name of the folder whose checkpoint it would push to the Hub."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if RANK == 0:
            print("pushes from", Path(checkpoint_folder).parent.name, flush=True)


torch.manual_seed(1)
tokens = torch.randint(32, (63 if args.order.endswith("-odd") else 64, 16))
data = [{"input_ids": row, "labels": row} for row in tokens]
options: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": args.epochs,
    "save_strategy": "steps" if args.own_saves else "no",
    "save_steps": args.own_saves or 1,
    "save_only_model": True,  # of the Trainer's own checkpoints
}
settings = TrainingArguments(
    os.environ.get("TMPDIR", "/tmp") + "/hf",
    logging_steps=1,
    save_total_limit=2,
    report_to="none",
    disable_tqdm=True,
    ddp_find_unused_parameters=False,  # else DDP never packs anew
    use_cpu=KIND == "cpu",
    seed=1,
    **(options | ORDERS[args.order.removesuffix("-odd")] | ast.literal_eval(args.settings)),
)
model = GPT2LMHeadModel(CONFIG)
model.register_forward_pre_hook(lambda *_: disturb(trainer.state.global_step + 1))
callbacks: list[TrainerCallback] = []
if args.patience:
    callbacks.append(EarlyStoppingCallback(args.patience))
trainer: Trainer = PushingTrainer(
    model, settings, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks
)
settings.push_to_hub = bool(args.own_saves)  # only now: a Trainer looks for the Hub as it is made
if args.bare:
    trainer.add_callback(StopCallback(**OPTIONS))
    trainer.train()
train(trainer, **OPTIONS)
if RANK == 0:
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    print("evaluated at", evaluated, "best at", trainer.state.best_global_step, flush=True)
leave_weights(model)
