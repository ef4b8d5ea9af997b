"""Writes a model's weights from a checkpoint as safetensors, for programs without hpc-ddp.

In one process, however many ranks wrote the checkpoint::

    python -m hpc_ddp.training.export RUN_FOLDER model.safetensors [--object NAME]
        [--step N | --best]

NAME is the model's in ``run.track``, by default ``model``. A name without ``.safetensors`` is a
folder's: for a model that is too large for this process's memory, in files of at most 5 GB with an
index, as Hugging Face's ``from_pretrained`` reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint.restore import open_checkpoint
from hpc_ddp.training.checkpoint.storage.resharding import Reader

MOST_BYTES = 5_000_000_000  # of the tensors in each file of a folder


def export(
    run: Path, out: Path, *, name: str = "model", step: int | None = None, best: bool = False
) -> int:
    """Write the tensors of the tracked object `name` as safetensors; return the checkpoint's step.

    Parameters
    ----------
    run
        the run's folder
    out
        with the suffix ``.safetensors`` the file to write, replaced in one step where it exists;
        else a new folder, for which the memory of one of its files is enough
    step
        the checkpoint's; None: the newest checkpoint
    best
        take the checkpoint that `Run.best` has marked; `step` is ignored

    Raises
    ------
    UsageError
        there is no such checkpoint, or no such object in it; safetensors is not installed; or
        `out` is a folder that exists
    HpcDdpError
        the checkpoint is damaged, can't be read, or is of another version's format; each rank had
        its own of some of the tensors; or `out` can't be written
    OSError
        the run can't be read
    ValueError
        `best`, and the newest checkpoint's manifest is damaged
    """
    folder = _choose_checkpoint(RunFolder(run.absolute()), step, best)
    if problem := checkpoints.verify(folder):
        raise HpcDdpError(f"{folder}: {problem}", hint=f"hpc-ddp verify {shlex.quote(str(run))}")
    reader = open_checkpoint(folder).reader
    sizes, prefix = _sizes_of(reader, name, folder), f"{name}."

    def read(keys: Iterable[str]) -> dict[str, torch.Tensor]:
        return {key: reader.read(prefix + key) for key in keys}

    if out.suffix == ".safetensors":
        _save_tensors(read(sizes), out)
    else:
        _save_folder(sizes, read, out)
    return checkpoints.step_of(folder)


def _sizes_of(reader: Reader, name: str, folder: Path) -> dict[str, int]:
    """Return the size in bytes of each tensor of the object `name`, by the tensor's name in the
    object. Raise HpcDdpError if each rank had its own of some tensors, UsageError if the object has
    none. The messages name the checkpoint's `folder`."""
    prefix = f"{name}."
    if of_ranks := sorted(key for key in reader.of_other_ranks if key.startswith(prefix)):
        more = f" and {len(of_ranks) - 1} more" if of_ranks[1:] else ""
        raise HpcDdpError(
            f"{folder}: each rank had its own {of_ranks[0]}{more}, so there is no one {name} to"
            " write",
            hint="let the script put them together, and write that: torch.save",
        )
    sizes = {
        key.removeprefix(prefix): reader.describe(key).nbytes
        for key in reader
        if key.startswith(prefix)
    }
    if not sizes:
        objects = sorted({key.partition(".")[0] for key in reader if not key.startswith("_")})
        raise UsageError(
            f"{folder} has no tensors of {name!r}; accepted: {', '.join(objects)}",
            hint=f"--object NAME, as run.track has it: --object {(objects or [name])[0]}",
        )
    return sizes


def _save_folder(
    sizes: Mapping[str, int], read: Callable[[list[str]], dict[str, torch.Tensor]], out: Path
) -> None:
    """Write tensors as safetensors into the new folder `out`: into ``model.safetensors``, or, above
    `MOST_BYTES`, into several files with an index, as Hugging Face's transformers names them.

    `sizes` has each tensor's size in bytes by its name, `read` returns the tensors of some names.
    Raise UsageError where `out` exists, or without safetensors; HpcDdpError if `out` can't be
    written. Errors of `read` come through. After an error nothing is left of a new folder.
    """
    if os.path.lexists(out):
        raise UsageError(f"{out} exists", hint="name a new folder, or a file: model.safetensors")
    groups = list(_groups_of(sizes))
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {key: file for file, keys in zip(names, groups, strict=True) for key in keys},
    }
    draft = _draft_of(out)
    try:
        draft.mkdir()
        if len(groups) == 1:
            _save_tensors(read(groups[0]), draft / "model.safetensors")
        else:
            for name, keys in zip(names, groups, strict=True):
                _save_tensors(read(keys), draft / name)
            (draft / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        draft.rename(out)
    except OSError as error:
        raise HpcDdpError(f"{out} can't be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _groups_of(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the names in `sizes` (bytes by name) in groups, in their order. A group has as many
    names as fit into `MOST_BYTES`, and at least one."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > MOST_BYTES:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def _draft_of(out: Path) -> Path:
    """Return a path beside `out` with a random name: other users, who can't foresee it, put no link
    to a file of the user's there."""
    return out.with_name(f".part-{os.urandom(8).hex()}.{out.name}")


def _save_tensors(tensors: dict[str, torch.Tensor], out: Path) -> None:
    """Write tensors by name as safetensors, by a draft and a rename.

    The tensors must be contiguous and share no memory, else safetensors refuses them. Those of a
    `Reader` are so, of tied weights as well; copies would take the model's memory a second time.

    Raise UsageError without the package safetensors, HpcDdpError if the file can't be written; an
    old file then stays.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise UsageError(
            "the package safetensors is not installed", hint="pip install safetensors"
        ) from None
    draft = _draft_of(out)
    try:
        save_file(tensors, draft, {"format": "pt"})  # transformers asks for it
        draft.replace(out)
    except Exception as error:  # safetensors has an error of its own for a full disk, say
        draft.unlink(missing_ok=True)
        raise HpcDdpError(f"{out} can't be written: {error}") from error


def _choose_checkpoint(run: RunFolder, step: int | None, best: bool) -> Path:
    """Return the folder of the best checkpoint with `best`, else of that of `step`, else of the
    newest one.

    Raise UsageError if there is no such checkpoint, OSError if the run can't be read, ValueError if
    the newest manifest, which names the best one, is damaged.
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
    """Export as the command line says, and print a line on the file; return 0. Print an HpcDdpError
    on stderr, and return its exit code.

    Other errors of `export` come through; wrong arguments raise SystemExit with code 2.
    """
    parser = argparse.ArgumentParser(description="Write a checkpoint's model as safetensors.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("out", type=Path, help="the file to write (.safetensors), or a new folder")
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
