"""Programs with another library's Trainer, or with checkpoints of their own."""

from __future__ import annotations

import random

from tests.programs.edits import add_after, append, change, drop
from tests.programs.own_loops import saved
from tests.programs.program import TRAINER_LINES, Program


def _words(count: int) -> str:
    """Return a text of words drawn at random, in lines of ten."""
    draw = random.Random(1)
    words = [f"w{draw.randrange(50)}" for _ in range(count)]
    return "".join(f"{' '.join(words[at : at + 10])}\n" for at in range(0, count, 10))


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

PROGRAMS = (LIGHTNING,)
