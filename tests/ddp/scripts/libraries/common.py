"""What the scripts of the libraries share: disturbances, and the weights at the end."""

import argparse
import atexit
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hpc_ddp.core.checkpoints import step_of
from hpc_ddp.training.checkpoint.storage import disk

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--at", type=int, default=-1, help="the step, from 1, in which to ...")
parser.add_argument("--signal", type=int, default=int(signal.SIGTERM), help="... send this signal")
parser.add_argument("--ranks", default="01", help="on these ranks; rank 1 two steps later")
parser.add_argument(
    "--kill-in-save", action="store_true", help="... or die amid a save of it or later"
)
parser.add_argument("--save-every-steps", type=int)
parser.add_argument("--step-seconds", type=float, default=0.005)
parser.add_argument("--width", type=int, default=8, help="of the hidden layer")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=4, help="of Lightning, of 32 samples a rank")
parser.add_argument("--own-saves", type=int, help="the Trainer's save_steps")
parser.add_argument("--patience", type=int, help="of an EarlyStoppingCallback, in evaluations")
parser.add_argument("--bare", action="store_true", help="train without the newest checkpoint")
parser.add_argument("--settings", default="{}", help="more TrainingArguments, a dict")
parser.add_argument("--plain", action="store_true", help="data that follow from the step alone")
parser.add_argument("--stateful", action="store_true", help="Lightning's loader of torchdata")
parser.add_argument("--accumulate", type=int, default=1, help="Lightning's batches a step")
parser.add_argument("--part", help="a part of the library that the script uses")
parser.add_argument("--order", default="shuffle", help="or another one of the script's")
args = parser.parse_args()
KIND = "cuda" if torch.cuda.is_available() else "cpu"  # the tests hide a GPU but with DEVICE=cuda
if KIND == "cuda":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)

RANK = int(os.environ.get("RANK", 0))
OPTIONS = {"save_every_steps": args.save_every_steps}


def disturb(step: int) -> None:
    """Send the signal if it is time to; `step` is the one under way."""
    time.sleep(args.step_seconds)
    at = args.at + (2 if RANK and args.at > 0 else 0)
    if str(RANK) in args.ranks and step == at and not args.kill_in_save:
        print(f"SIGNAL in step {step}", flush=True)
        os.kill(os.getpid(), args.signal)


def write_or_die(folder: Path, *facts: Any) -> None:
    """Write the manifest of a checkpoint, or die in place of it after the step."""
    if step_of(folder) >= args.at:
        os.kill(os.getpid(), signal.SIGKILL)
    write_manifest(folder, *facts)


write_manifest = disk.write_manifest
if args.kill_in_save:
    vars(disk)["write_manifest"] = write_or_die


def leave_weights(model: torch.nn.Module) -> None:
    """Write the bytes of the weights into the run's folder, on rank 0."""
    script = Path(sys.argv[0]).stem
    run = os.environ["HPC_DDP_RUN"] or Path(os.environ["HPC_DDP_RUNS"]) / script / "local"
    if RANK == 0:
        tensors = model.state_dict().values()
        weights = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)
        (Path(run) / "weights").write_bytes(weights)
    atexit._run_exitfuncs()  # the tests' workers leave without them
