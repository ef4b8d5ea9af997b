"""The defaults of a job: its name, its working directory, its Python."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hpc_ddp.core.errors import UsageError


def working_directory(cwd: Path, text: str) -> str:
    """Return where a job is to run: `cwd`, or the folder that ``chdir`` names, by its `text` (''
    without).

    Raises
    ------
    UsageError
        there is no such folder
    """
    path = (cwd / os.path.expanduser(text)).absolute()
    if not path.is_dir():
        raise UsageError(f"working directory {str(path)!r} does not exist", hint="--chdir DIR")
    return str(path)


def name_for(script: Path) -> str:
    """Return a job name made of a script's file name, without what a job name can't have; ``job``
    where nothing is left."""
    return re.sub(r"[^\w.+=,@-]+", "-", script.stem).lstrip(".+=,@-")[:100] or "job"


def default_python(setup: Sequence[str], in_container: bool) -> str:
    """Return the interpreter for the workers when none is named.

    The one that runs now, where it has torch and no line of `setup` activates another environment.
    Else the first one on PATH, once the set-up lines are through: ``python``, or ``python3`` where
    there is no such line, nor a ``python`` here. In a container its own, ``python3``.
    """
    if in_container:
        return "python3"
    activates = any("activate" in line for line in setup)
    if not activates and find_spec("torch"):  # looks for it without importing it
        return sys.executable
    return "python" if setup or shutil.which("python") else "python3"
