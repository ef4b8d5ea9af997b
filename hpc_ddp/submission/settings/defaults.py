"""The defaults of a job: its name, its working directory, its Python."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_ddp.core.attempt_env import installed_python
from hpc_ddp.core.errors import UsageError

# With one of these flags SCRIPT is no file.
NO_FILE = ("module", "no-python")


def names_no_file(values: Mapping[str, Any]) -> bool:
    """Return whether the ``script`` of some settings, by key, is a module or a command."""
    return any(values.get(key) for key in NO_FILE)


def is_same_program(settings: Mapping[str, Any], earlier: Mapping[str, Any], cwd: Path) -> bool:
    """Return whether `settings` name the same program as `earlier` ones, by ``script`` and the
    `NO_FILE` flags; True where `earlier` has no script. Relative paths are seen from `cwd`. An
    earlier script that does not exist any more counts as moved, so as the same where the file names
    are equal."""
    if not earlier.get("script"):
        return True
    if any(bool(settings.get(key)) != bool(earlier.get(key)) for key in NO_FILE):
        return False
    new, old = (Path(os.path.realpath(cwd / values["script"])) for values in (settings, earlier))
    return new == old or (new.name == old.name and not old.exists())


def absolute(path: Path) -> Path:
    """Return an absolute path without ``..``, so that it can be compared with others, and mounted
    in a container. Links are kept, except in a path with a ``..``, which is resolved."""
    return path.resolve() if ".." in path.parts else path.absolute()


def working_directory(cwd: Path, text: str) -> str:
    """Return the path of the folder where a job is to run. `text` is the value of ``chdir``, seen
    from `cwd`; '' stands for `cwd` itself.

    Raises
    ------
    UsageError
        there is no such folder
    """
    path = absolute(cwd / os.path.expanduser(text))
    if not path.is_dir():
        raise UsageError(f"working directory {str(path)!r} does not exist", hint="--chdir DIR")
    return str(path)


def name_for(script: Path, is_module: bool = False) -> str:
    """Return a job name made of a script's file name without its suffix, or (`is_module`) of the
    last part of a module's name: 100 characters at most. Characters that a job name can't have
    become ``-``, or are left out at its start; ``job`` where nothing is left."""
    name = script.name.rpartition(".")[2] if is_module else script.stem
    return re.sub(r"[^\w.+=,@-]+", "-", name).lstrip(".+=,@-")[:100] or "job"


def check_script(script: Path, in_image: bool) -> None:
    """Raise UsageError for a script, an absolute path, that does not exist or is not Python's. The
    hint has a command that the user may need instead: for a program, a module, a script of sbatch,
    or, if the job has an image (`in_image`), a file in it. Raise OSError where the script can't be
    read."""
    name = script.name
    if script.is_dir():
        raise UsageError(
            f"script {str(script)!r} is a folder; accepted: a file of Python",
            hint=f"hpc-ddp submit {shlex.quote(os.path.join(name, 'train.py'))}, or -m PACKAGE",
        )
    if not script.is_file():
        hint = f"ls {script.parent}"
        if shutil.which(name):
            hint = f"a command: hpc-ddp submit --no-python {shlex.quote(name)} …"
        elif in_image:
            hint = f"a script in the image: --image IMAGE --no-python python3 {script} …"
        elif Path(script.parent, *name.split(".")).with_suffix(".py").is_file():
            hint = f"a module: hpc-ddp submit -m {shlex.quote(name)} …"
        raise UsageError(f"script {str(script)!r} does not exist", hint=hint)
    with script.open("rb") as file:
        start_of_file = file.read(10_000)
    first_line = start_of_file.partition(b"\n")[0]
    if script.suffix != ".py" and re.search(rb"^#SBATCH\s", start_of_file, re.M):
        raise UsageError(
            f"{script} is a script for sbatch; accepted: the Python script that it starts",
            hint=f"hpc-ddp import {shlex.quote(name)}, which writes hpc-ddp.toml from it",
        )
    has_interpreter = first_line.startswith(b"#!") and b"python" not in first_line
    is_binary = b"\0" in first_line
    is_shell = script.suffix in (".sh", ".bash", ".slurm", ".sbatch")
    if (has_interpreter and script.suffix != ".py") or is_binary or is_shell:
        command = f"{'./' if is_binary else 'bash '}{shlex.quote(name)}"
        raise UsageError(
            f"{script} is no Python script",
            hint=f"a command for each worker: --no-python {command} …",
        )


def default_python(setup: Sequence[str], in_container: bool) -> str:
    """Return the interpreter for the workers of a job that names none. `setup` has the job's set-up
    lines.

    In a container it is ``python3``. Else it is the Python of this process, where that has torch
    and no set-up line activates another environment. Otherwise it is ``python``, which the job
    looks for on PATH after the set-up lines; but ``python3`` where there are no set-up lines and
    this machine has no ``python``.
    """
    if in_container:
        return "python3"
    activates = any("activate" in line for line in setup)
    if not activates and find_spec("torch"):  # find_spec does not import it
        return installed_python()
    return "python" if setup or shutil.which("python") else "python3"
