"""A script with the Trainer of Hugging Face Transformers: a small GPT-2 of random weights.

transformers_script.py [seconds a step]
"""

import sys
import tempfile
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hpc_ddp.integrations.transformers import StopCallback

PAUSE_S = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
STEPS = 80
CONFIG = GPT2Config(
    vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)


def show_step(*_: object) -> None:
    time.sleep(PAUSE_S)
    if trainer.state.global_step % 20 == 0 and trainer.is_world_process_zero():
        print(f"step {trainer.state.global_step} of {STEPS}", flush=True)


torch.manual_seed(1)
tokens = torch.randint(32, (2560, 16))  # 80 batches of 8 on each of 4 ranks
data = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(CONFIG)
model.register_forward_pre_hook(show_step)
settings = TrainingArguments(
    tempfile.mkdtemp(),  # unused: the run has the checkpoints
    per_device_train_batch_size=8,
    num_train_epochs=1,
    logging_steps=10,
    disable_tqdm=True,
    save_strategy="no",
    report_to="none",
    ddp_find_unused_parameters=False,
    use_cpu=True,
)
stop = StopCallback()
trainer = Trainer(model, settings, train_dataset=data, callbacks=[stop])
trainer.train(resume_from_checkpoint=stop.latest(trainer))
if trainer.is_world_process_zero():
    step, ranks = trainer.state.global_step, settings.world_size
    print(f"done at step {step} with {ranks} ranks", flush=True)
