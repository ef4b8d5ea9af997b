"""Programs with another library's Trainer, or with checkpoints of their own."""

from __future__ import annotations

import json
import random

from tests.programs.edits import add_after, append, change, drop
from tests.programs.own_loops import saved
from tests.programs.program import TRAINER_LINES, Program

VOCABULARY = 50


def _words(count: int) -> str:
    """Return a text of words drawn at random, in lines of ten."""
    draw = random.Random(1)
    words = [f"w{draw.randrange(VOCABULARY)}" for _ in range(count)]
    return "".join(f"{' '.join(words[at : at + 10])}\n" for at in range(0, count, 10))


def _tokenizer() -> str:
    """Return the file of a tokenizer of those words."""
    model = {"type": "WordLevel", "vocab": {f"w{it}": it for it in range(VOCABULARY)}}
    parts = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    return json.dumps({**parts, "model": {**model, "unk_token": "w0"}})


LIGHTNING = Program(
    name="Lightning's transformer",
    repository="Lightning-AI/pytorch-lightning",
    commit="7f0c3436cd",
    script="examples/pytorch/basics/transformer.py",
    files={"data/wikitext-2.txt": _words(53_000)},  # 1600 samples of 35, with the ends of lines
    here={
        "transformer.py": (
            change(r"^import torch$", "import os, time, torch"),
            change(r"^(\s+)(output = self\.model.*\n.*\n.*train_loss)", r"\1time.sleep(0.1)\n\1\2"),
            change(r"n - 4000, 2000, 2000", "n - 80, 40, 40"),
            change(r"(batch_size=)20, shuffle=True", r"\g<1>4, shuffle=True"),
            change(
                r"(L\.Trainer\(.*)max_epochs=20\)$",
                r'\1max_epochs=1, accelerator="cpu", devices=2, num_nodes=2)',
            ),
            add_after(r"trainer\.test\(", saved("model.state_dict()")),
        )
    },
    adopted={
        "transformer.py": (
            add_after(
                r"from lightning\.pytorch\.demos",
                "from hpc_ddp.integrations.lightning import StopCallback",
            ),
            change(r"(L\.Trainer\(.*)\)$", r"\1, callbacks=[stop := StopCallback()])"),
            change(r"(trainer\.fit\(.*)\)$", r"\1, ckpt_path=stop.latest(trainer))"),
        )
    },
    limit=TRAINER_LINES + 1,
    unequal_because=(
        "Lightning begins the epoch's order anew after a stop amid it, and restores no generator"
    ),
)

TRANSFORMERS = Program(
    name="Transformers' run_clm",
    repository="huggingface/transformers",
    commit="00d481d18f",
    script="examples/pytorch/language-modeling/run_clm.py",
    args=(
        *("--output_dir", "out", "--cache_dir", "cache", "--report_to", "none", "--use_cpu"),
        *("--model_type", "gpt2", "--tokenizer_name", "words"),
        *("--config_overrides", f"n_embd=16,n_layer=1,n_head=2,vocab_size={VOCABULARY}"),
        *("--do_train", "--train_file", "words.txt", "--block_size", "16"),
        *("--per_device_train_batch_size", "4", "--num_train_epochs", "1"),
    ),
    files={
        "words.txt": _words(31_000),  # 1840 samples for training, in 115 steps
        "words/tokenizer.json": _tokenizer(),
        "words/tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
    },
    here={
        "run_clm.py": (
            change(r"^import math$", "import math, time"),
            add_after(
                r"model = AutoModelForCausalLM\.from_config",
                "model.register_forward_pre_hook(lambda *_: time.sleep(0.1))",
            ),
            add_after(r"trainer\.save_model\(", saved("model.state_dict()")),
        )
    },
    adopted={
        "run_clm.py": (
            add_after(
                r"from transformers\.utils\.versions",
                "from hpc_ddp.integrations.transformers import StopCallback",
            ),
            add_after(r"data_collator=", "callbacks=[stop := StopCallback()],"),
            change(r"checkpoint = None$", "checkpoint = stop.latest()"),
        )
    },
    limit=TRAINER_LINES + 1,
)

PROGRAMS = (LIGHTNING, TRANSFORMERS)
