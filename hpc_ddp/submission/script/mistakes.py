"""Probable mistakes in a job, of which a submit warns."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hpc_ddp.core.attempt_env import installed_python
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.variables import literal_names
from hpc_ddp.submission.script.overridden_options import find_ineffective


def find_mistakes(spec: JobSpec) -> list[str]:
    """Return warnings about probable mistakes in a job, a sentence each: programs that are
    `_missing_here`, a syntax error of the script where it can be read here, an array instead of a
    chain, ``$NAME`` that is not filled in, an interface that leads to no other node, and settings
    without effect (`find_ineffective`)."""
    mistakes = [*_missing_here(spec)]
    if not spec.no_python:
        mistakes += _source_mistakes(spec.module_file or spec.program)
    if (spec.array or "").endswith("%1") and not spec.sweep:  # one task at a time
        mistakes.append(
            f"array {spec.array} has runs that begin anew each, one after the other; one run goes"
            " on by itself after its time limit, without an array"
        )
    if marks := literal_names(_unexpanded_texts(spec), spec.expand):
        mistakes.append(
            f"{', '.join(marks)} stays as it is; with --expand NAME, $NAME is its value in the job;"
            " for more than a name: --worker-setup 'export NAME=…'"
        )
    interfaces = {name: text for name, text in spec.env.items() if name.endswith("_SOCKET_IFNAME")}
    # A "=" in front means exactly this name.
    for name in (name for name, text in interfaces.items() if text.lstrip("=") == "lo"):
        if spec.nodes != 1:
            mistakes.append(
                f"{name} is lo, the loopback interface, on which no node reaches another; hpc-ddp"
                " finds the right one where it is not set"
            )
    return [*mistakes, *find_ineffective(spec)]


def _source_mistakes(file: Path) -> list[str]:
    """Return a warning, as a list, about a file of Python that is empty or has a syntax error (for
    this process's Python: the job's may be newer); [] where there is none, and for a file that
    can't be read here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compile prints them
            source = file.read_bytes()
            compile(source, str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        return [f"{file}, line {error.lineno}: {error.msg}"]
    except (OSError, ValueError):  # ValueError: a null byte
        return []
    return [] if source.strip() else [f"{file} is empty"]


def _unexpanded_texts(spec: JobSpec) -> list[str]:
    """Return the texts of a job in which no shell fills in ``$NAME``."""
    # Words of bash -c are the shell's.
    is_shell = spec.no_python and re.search(r"(^|/)\w*sh$", spec.script)
    return [
        *(() if is_shell else spec.args),
        *spec.env.values(),
        spec.image or "",
        spec.python,
        spec.container or "",
        *spec.container_options,
        spec.resume_args,
        *spec.srun,
        *spec.mpirun,
        *(text for texts in spec.sweep.values() for text in texts),
    ]


def _missing_here(spec: JobSpec) -> Iterator[str]:
    """Yield warnings about an image, a Python, a module or a command that this machine does not
    have, a sentence each. It is only probable that the nodes lack it, too. Programs in a container,
    or that set-up lines may bring, are passed over."""
    image = spec.image or ""
    # A path, or a name with a suffix of image files; a registry's URL has a colon.
    is_file = re.fullmatch(r"\.{0,2}/[^:$]*|[^:$]*\.(sif|simg|sqsh|img)", image)
    if is_file and not (Path(spec.chdir, image).exists() or spec.container_tool == "shifter"):
        yield f"image {image} is not on this machine; is it on the nodes?"
    if spec.container or spec.image:
        return
    if spec.python.startswith("~"):  # known users' are paths by now
        yield f"python {spec.python} names no user of this machine, and stays as it is in the job"
    elif os.path.isabs(spec.python) and not os.path.exists(spec.python):
        yield f"python {spec.python} is not on this machine; is it on the nodes?"
    variables = {*spec.env, *spec.env_names}
    has_lines = spec.setup or spec.node_setup or spec.worker_setup
    may_find_more = has_lines or variables & {"PATH", "PYTHONPATH"}
    if spec.module and not spec.module_file:
        package = spec.script.partition(".")[0]
        if Path(spec.chdir, package).is_dir():
            yield f"there is {package}/ in {spec.chdir}, but no module {spec.script}"
        elif spec.python == installed_python() and not (
            may_find_more or package in sys.modules or find_spec(package)
        ):
            yield f"there is no module {package}, neither in {spec.chdir} nor in {spec.python}"
    if spec.no_python and not may_find_more and "$" not in spec.script:
        path = spec.script if "/" not in spec.script else os.path.join(spec.chdir, spec.script)
        if not shutil.which(path):
            yield f"there is no command {spec.script} on this machine; is it on the nodes?"
