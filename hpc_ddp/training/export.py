"""A model on its way out of a run, for programs that know nothing of hpc-ddp.

`Run.export` writes the weights and a program of the model in memory. From the checkpoint's files
alone, on one process, however many ranks wrote it, comes the file of weights::

    python -m hpc_ddp.training.export RUN_FOLDER model.safetensors [--step N | --best]
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint.restorer import open_checkpoint


def export(
    run: Path, out: Path, *, name: str = "model", step: int | None = None, best: bool = False
) -> int:
    """Write the tensors of the tracked object `name`; return the step of the checkpoint.

    Parameters
    ----------
    run
        the run's folder
    out
        the file to write, replaced in one step where it exists
    step
        which checkpoint; by default the newest
    best
        the one that `Run.best` has marked

    Raises
    ------
    UsageError
        there is no such checkpoint, or no such object in it; or safetensors is not installed
    HpcDdpError
        the checkpoint is damaged, or each rank had its own of some of the tensors
    """
    folder = _choose(RunFolder(run.absolute()), step, best)
    if problem := checkpoints.verify(folder):
        raise HpcDdpError(f"{folder}: {problem}", hint=f"hpc-ddp verify {run}")
    _, _, reader = open_checkpoint(folder)
    prefix = f"{name}."
    if of_ranks := sorted(key for key in reader.of_ranks if key.startswith(prefix)):
        more = f" and {len(of_ranks) - 1} more" if of_ranks[1:] else ""
        raise HpcDdpError(
            f"{folder}: each rank had its own {of_ranks[0]}{more}, so there is no one {name} to"
            " write",
            hint="let the script put them together, and write that: run.export, torch.save",
        )
    tensors = {key[len(prefix) :]: reader.read(key) for key in reader if key.startswith(prefix)}
    if not tensors:
        objects = sorted({key.partition(".")[0] for key in reader})
        raise UsageError(f"{folder} has no tensors of {name!r}; accepted: {', '.join(objects)}")
    _save_tensors(tensors, out)
    return checkpoints.step_of(folder)


def check_export(example: object, *, is_part: bool, is_over: bool) -> None:
    """Raise UsageError for a call of `Run.export` that makes no sense."""
    if is_part:
        raise UsageError(
            "run.export was given a part of a model; accepted: one that each rank has whole",
            hint="python -m hpc_ddp.training.export writes the weights of a checkpoint",
        )
    if not isinstance(example, torch.Tensor) or example.dim() < 1:
        scalar = " of no dimension" if isinstance(example, torch.Tensor) else ""
        raise UsageError(
            f"run.export was given a {type(example).__name__}{scalar} as an example; accepted:"
            " a tensor, of which the first dimension counts samples",
            hint="run.export(model, inputs), or inputs[None] for one sample",
        )
    if is_over:
        raise UsageError(
            "run.export was called after run.finish, when the ranks have parted",
            hint="call it before run.finish()",
        )


def export_model(model: torch.nn.Module, example: torch.Tensor, folder: Path) -> None:
    """Write ``model.safetensors`` and ``model.pt2`` into `folder`, each in one step.

    Both are of a copy on the CPU, so that they load where there is no GPU.

    Parameters
    ----------
    model
        in eval mode, without wrappers
    example
        a batch as `model` takes it, of any size: that of the first dimension stays open

    Raises
    ------
    UsageError
        torch.export can't trace the model; its weights have been written by then
    HpcDdpError
        a file can't be written
    """
    # Weights go to the CPU one by one: a copy on the device may find no room there.
    tensors = chain(model.parameters(), model.buffers())
    plain = copy.deepcopy(model, {id(tensor): _on_cpu(tensor) for tensor in tensors}).cpu()
    folder.mkdir(exist_ok=True)
    _save_tensors(plain.state_dict(), folder / "model.safetensors")
    two = example[:1].cpu().repeat(2, *[1] * (example.dim() - 1))  # one would be taken as fixed
    try:
        batch = torch.export.Dim("batch")
        program = torch.export.export(plain, (two,), dynamic_shapes=({0: batch},))
    except Exception as error:  # of many kinds, with pages of advice behind the first line
        why = (str(error).splitlines() or [repr(error)])[0]
        if "required argument" in why:
            cure = "export a module whose forward takes one tensor and passes on the rest"
        else:
            cure = "let its forward take no way that depends on numbers"
        raise UsageError(
            f"torch.export can't make a program of the model: {why}",
            hint=f"{cure}; or leave out run.export: python -m hpc_ddp.training.export writes the"
            " weights alone",
        ) from error
    with _replacing(folder / "model.pt2") as draft:
        torch.export.save(program, draft)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, a parameter of a parameter."""
    plain = tensor.detach().to("cpu", copy=True)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(plain, tensor.requires_grad) if is_parameter else plain


def _save_tensors(tensors: Mapping[str, torch.Tensor], out: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise UsageError(
            "the package safetensors is not installed", hint="pip install safetensors"
        ) from None
    with _replacing(out) as draft:
        # It refuses tensors that share memory, as tied weights do.
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, draft)


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield where to write what takes the place of `out` once it is complete."""
    draft = out.with_name(f".part.{out.name}")
    try:
        yield draft
        draft.replace(out)
    except Exception as error:  # safetensors has an error of its own for a full disk, say
        raise HpcDdpError(f"{out} can't be written: {error}") from error


def _choose(run: RunFolder, step: int | None, best: bool) -> Path:
    newest_first = checkpoints.published(run.checkpoints)
    if not newest_first:
        raise UsageError(f"{run.path} has no checkpoint", hint="name a run's folder")
    if best:
        step = (checkpoints.read_manifest(newest_first[0]).get("best") or {}).get("step")
        if step is None:
            raise UsageError(f"{run.path} has no best checkpoint: its script calls no run.best")
    wanted = [path for path in newest_first if step is None or checkpoints.step_of(path) == step]
    if not wanted:
        steps = ", ".join(str(checkpoints.step_of(path)) for path in newest_first)
        raise UsageError(f"{run.path} has no checkpoint of step {step}; accepted: {steps}")
    return wanted[0]


def main() -> int:
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
