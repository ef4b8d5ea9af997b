"""A Trainer with a GPT-2 of random weights, dropout and shuffled data."""

import ast
import os
from typing import Any

import torch
from common import OPTIONS, RANK, args, disturb, leave_weights
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hpc_ddp.integrations.transformers import train

CONFIG = GPT2Config(
    vocab_size=32,
    n_positions=16,
    n_embd=2 * args.width,
    n_layer=1,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
)

torch.manual_seed(1)
tokens = torch.randint(32, (64, 16))
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
    use_cpu=True,
    seed=1,
    **(options | ast.literal_eval(args.settings)),
)
model = GPT2LMHeadModel(CONFIG)
model.register_forward_pre_hook(lambda *_: disturb(trainer.state.global_step + 1))
trainer: Trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data[:8])
train(trainer, **OPTIONS)
if RANK == 0:
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    print("evaluated at", evaluated, "best at", trainer.state.best_global_step, flush=True)
leave_weights(model)
