"""Programs with a loop of their own: at most ten lines for each."""

from __future__ import annotations

from tests.programs.edits import add_after, change, drop
from tests.programs.program import RESULT, Program

EXAMPLES = "pytorch/examples"
EXAMPLES_COMMIT = "77f55b9"
START = "from hpc_ddp.training import start"


def saved(weights: str) -> str:
    """Return the line by which rank 0 writes its weights in the end."""
    write = f"torch.save({weights}, os.environ['{RESULT}'])"
    return f"if os.environ['RANK'] == '0': {write}"


MULTIGPU = Program(
    name="the tutorial's multi-GPU trainer",
    repository=EXAMPLES,
    commit=EXAMPLES_COMMIT,
    script="distributed/ddp-tutorial-series/multigpu_torchrun.py",
    args=("30", "10"),
    here={
        "multigpu_torchrun.py": (
            change(r"^import torch$", "import torch, time"),
            add_after(r"self\.optimizer\.step\(\)", "time.sleep(0.02)"),
            add_after(r"trainer\.train\(total", saved("trainer.model.module.state_dict()")),
        )
    },
    adopted={
        "multigpu_torchrun.py": (
            add_after("from datautils", START),
            drop(r"def ddp_setup", r"init_process"),
            drop(r"self\.model = model\.to"),
            drop(r"if os\.path\.exists\(snap", r"self\._load_snapshot"),
            change(r"^(\s+self\.model = )DDP\(.*\)$", r"\1run.wrap(model)"),
            add_after(
                r"self\.model = run", "run.track(model=self.model, optimizer=self.optimizer)"
            ),
            drop(r"def _load_snapshot", r"print\(f.Resuming"),
            drop(r"def _save_snapshot", r"print\(f.Epoch"),
            change(r"loss\.backward\(\)", "run.backward(loss)"),
            add_after(r"self\.optimizer\.step\(\)", "run.step(loss=loss)"),
            drop(r"self\.train_data\.sampler"),
            drop(r"\w+ = \w+\.to\(self\.gpu", count=2),
            change(r"in range\(self.epochs_run, max_epochs\)", "in run.epochs(max_epochs)"),
            drop(r"if self\.gpu_id == 0", r"self\._save_snapshot"),
            change(
                r"return DataLoader\((?:.*\n)*?    \)$", "return run.loader(dataset, batch_size)"
            ),
            drop(r"ddp_setup\(\)"),
            change(r"^    destroy_process_group\(\)", "    run.finish()"),
            change(r"^(    import argparse)$", r"\1\n    run = start()"),
        )
    },
)

PROGRAMS = (MULTIGPU,)
