"""The imports that an attempt has made by its first step, for the fork server of later ones.

A script may import more than its text shows: a library loads a model's code when it is built.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from hpc_ddp.core import process
from hpc_ddp.core.file_io import read_json, write_json

FILE = "imports.json"  # in the folder of the journal
INSTALLED = {"site-packages", "dist-packages"}
# Variables of torch, which is imported before, and of what it uses.
READ_BY_TORCH = ("TORCH", "NCCL_", "GLOO_", "CUBLAS_", "CUDA_", "HPC_DDP_", "KINETO_")


def record_imports(folder: Path) -> None:
    """Write the names of the installed modules that this worker has imported and its fork server
    had not, in their order, to the journal's `folder`; nothing in a process without such a server,
    after the first time, if the disk fails, or if the worker has changed a variable on which these
    imports may depend."""
    path, ahead = folder / FILE, process.imports_ahead
    if ahead is None or path.exists():
        return
    changed = {name for name, text in ahead.environ.items() ^ os.environ.items()}
    if not all(name.startswith(READ_BY_TORCH) for name in changed):
        return
    names = [name for name in sys.modules if name not in ahead.modules]
    with contextlib.suppress(OSError):
        write_json(path, {"modules": [name for name in names if _is_installed(name)]})


def recorded_imports(folder: Path) -> list[str]:
    """Return the names of the modules that an earlier attempt has recorded; [] without such a
    file, and for a damaged one."""
    names = read_json(folder / FILE).get("modules")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def drop_recorded_imports(folder: Path) -> None:
    """Have later attempts pass over what has been recorded: it does not survive a fork."""
    with contextlib.suppress(OSError):
        write_json(folder / FILE, {"modules": []})


def _is_installed(name: str) -> bool:
    """Return whether a module is of an installed package, and can be imported by its name."""
    spec = getattr(sys.modules[name], "__spec__", None)
    origin = getattr(spec, "origin", None)
    return getattr(spec, "name", "") == name and bool(INSTALLED & set(Path(origin or "").parts))
