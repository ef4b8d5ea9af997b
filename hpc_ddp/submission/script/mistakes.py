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
from hpc_ddp.submission.script.effect import without_effect


def find_mistakes(spec: JobSpec) -> list[str]:
    """Return warnings about probable mistakes in a job, a sentence each: programs `_not_here`, a
    syntax error of the script where it can be read here, an array instead of a chain, variables
    that stay as they are, an interface that leads to no other node, and settings
    `without_effect`."""
    mistakes = [*_not_here(spec)]
    file = spec.module_file or spec.program
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not spec.no_python:
                source = file.read_bytes()
                compile(source, str(file), "exec", dont_inherit=True)
                if not source.strip():
                    mistakes.append(f"{file} is empty")
    except SyntaxError as error:  # the job's Python may be a newer one
        mistakes.append(f"{file}, line {error.lineno}: {error.msg}")
    except (OSError, ValueError):
        pass
    if (spec.array or "").endswith("%1") and not spec.sweep:
        mistakes.append(
            f"array {spec.array} has runs that begin anew each, one after the other; one run goes"
            " on by itself after its time limit, without an array"
        )
    # Words of bash -c are the shell's.
    is_shell = spec.no_python and re.search(r"(^|/)\w*sh$", spec.script)
    texts = (*(() if is_shell else spec.args), *spec.env.values(), spec.image or "", spec.python)
    texts += (spec.container or "", *spec.container_options, spec.resume_args)
    texts += (*spec.srun, *spec.mpirun, *(text for texts in spec.sweep.values() for text in texts))
    if marks := literal_names(texts, spec.expand):
        mistakes.append(
            f"{', '.join(marks)} stays as it is; with --expand NAME, $NAME is its value in the job;"
            " for more than a name: --worker-setup 'export NAME=…'"
        )
    interfaces = {name: text for name, text in spec.env.items() if name.endswith("_SOCKET_IFNAME")}
    for name in (name for name, text in interfaces.items() if text.lstrip("=") == "lo"):
        if spec.nodes != 1:
            mistakes.append(
                f"{name} is lo, the loopback interface, on which no node reaches another; hpc-ddp"
                " finds the right one where it is not set"
            )
    return [*mistakes, *without_effect(spec)]


def _not_here(spec: JobSpec) -> Iterator[str]:
    """Yield warnings about an image, a Python, a module or a command that this machine does not
    have, a sentence each. Only the nodes have to have them; what is in a container, or set-up lines
    may bring, is passed over."""
    image = spec.image or ""
    is_file = re.fullmatch(r"\.{0,2}/[^:$]*|[^:$]*\.(sif|simg|sqsh|img)", image)
    if is_file and not (Path(spec.chdir, image).exists() or spec.container_tool == "shifter"):
        yield f"image {image} is not on this machine; is it on the nodes?"
    if spec.container or spec.image:
        return
    if os.path.isabs(spec.python) and not os.path.exists(spec.python):
        yield f"python {spec.python} is not on this machine; is it on the nodes?"
    top, names = spec.script.partition(".")[0], (*spec.env, *spec.env_names)
    has_lines = spec.setup or spec.node_setup or spec.worker_setup
    has_more = has_lines or "PATH" in names or "PYTHONPATH" in names
    if spec.module and not spec.module_file:
        if Path(spec.chdir, top).is_dir():
            yield f"there is {top}/ in {spec.chdir}, but no module {spec.script}"
        elif spec.python == installed_python() and not (
            has_more or top in sys.modules or find_spec(top)
        ):
            yield f"there is no module {top}, neither in {spec.chdir} nor in {spec.python}"
    if spec.no_python and not has_more and "$" not in spec.script:
        path = spec.script if "/" not in spec.script else os.path.join(spec.chdir, spec.script)
        if not shutil.which(path):
            yield f"there is no command {spec.script} on this machine; is it on the nodes?"
