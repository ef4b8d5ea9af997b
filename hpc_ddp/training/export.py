"""Writes a model's weights from a checkpoint as safetensors, for programs without hpc-ddp.

In one process, however many ranks wrote the checkpoint::

    python -m hpc_ddp.training.export RUN_FOLDER model.safetensors [--object NAME]
        [--step N | --best]

NAME is the model's in ``run.track``, by default ``model``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint.restore import open_checkpoint


def export(
    run: Path, out: Path, *, name: str = "model", step: int | None = None, best: bool = False
) -> int:
    """Write the tensors of the tracked object `name` as safetensors; return the checkpoint's step.

    Parameters
    ----------
    run
        the run's folder
    out
        the file to write, replaced in one step where it exists
    step
        which checkpoint; None: the newest
    best
        the one that `Run.best` has marked, in place of `step`

    Raises
    ------
    UsageError
        there is no such checkpoint, or no such object in it; or safetensors is not installed
    HpcDdpError
        the checkpoint is damaged or of another version's format, each rank had its own of some of
        the tensors, or `out` can't be written
    OSError
        the run can't be read
    ValueError
        `best`, and the newest checkpoint's manifest is damaged
    """
    folder = _choose(RunFolder(run.absolute()), step, best)
    if problem := checkpoints.verify(folder):
        raise HpcDdpError(f"{folder}: {problem}", hint=f"hpc-ddp verify {run}")
    reader = open_checkpoint(folder).reader
    prefix = f"{name}."
    if of_ranks := sorted(key for key in reader.of_other_ranks if key.startswith(prefix)):
        more = f" and {len(of_ranks) - 1} more" if of_ranks[1:] else ""
        raise HpcDdpError(
            f"{folder}: each rank had its own {of_ranks[0]}{more}, so there is no one {name} to"
            " write",
            hint="let the script put them together, and write that: torch.save",
        )
    tensors = {key[len(prefix) :]: reader.read(key) for key in reader if key.startswith(prefix)}
    if not tensors:
        objects = sorted({key.partition(".")[0] for key in reader if not key.startswith("_")})
        raise UsageError(
            f"{folder} has no tensors of {name!r}; accepted: {', '.join(objects)}",
            hint=f"--object NAME, as run.track has it: --object {(objects or [name])[0]}",
        )
    _save_tensors(tensors, out)
    return checkpoints.step_of(folder)


def _save_tensors(tensors: dict[str, torch.Tensor], out: Path) -> None:
    """Write tensors by name as safetensors, by a draft and a rename.

    They are contiguous and share no memory, else safetensors refuses them. A `Reader` gives such
    ones, of tied weights as well; copies would take the model's memory a second time.

    Raise UsageError without the package safetensors, HpcDdpError if the file can't be written; the
    old one then stays.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise UsageError(
            "the package safetensors is not installed", hint="pip install safetensors"
        ) from None
    # No name that others could foresee, and put a link to a file of the user's in its place.
    draft = out.with_name(f".part-{os.urandom(8).hex()}.{out.name}")
    try:
        save_file(tensors, draft)
        draft.replace(out)
    except Exception as error:  # safetensors has an error of its own for a full disk, say
        draft.unlink(missing_ok=True)
        raise HpcDdpError(f"{out} can't be written: {error}") from error


def _choose(run: RunFolder, step: int | None, best: bool) -> Path:
    """Return the folder of the newest checkpoint, of the best one, or of a step.

    Raise UsageError if there is none, OSError if the run can't be read, ValueError if the manifest
    that names the best one is damaged.
    """
    newest_first = checkpoints.published(run.checkpoints)
    if not newest_first:
        raise UsageError(f"{run.path} has no checkpoint", hint="name a run's folder")
    if best:
        step = (checkpoints.read_manifest(newest_first[0]).get("best") or {}).get("step")
        if step is None:
            raise UsageError(f"{run.path} has no best checkpoint: its script calls no run.best")
    matches = [path for path in newest_first if step is None or checkpoints.step_of(path) == step]
    if not matches:
        steps = ", ".join(str(checkpoints.step_of(path)) for path in newest_first)
        raise UsageError(f"{run.path} has no checkpoint of step {step}; accepted: {steps}")
    return matches[0]


def main() -> int:
    """Export by the command line; return 0, or an HpcDdpError's exit code after printing it.

    Other errors of `export` come through; wrong arguments raise SystemExit with code 2.
    """
    parser = argparse.ArgumentParser(description="Write a checkpoint's model as safetensors.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--object", default="model", help="its name in run.track")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the checkpoint's step (default: the newest)")
    which.add_argument("--best", action="store_true", help="the one that run.best has marked")
    args = parser.parse_args()
    try:
        step = export(args.run, args.out, name=args.object, step=args.step, best=args.best)
    except HpcDdpError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    print(f"{args.out}: {args.object} of step {step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
