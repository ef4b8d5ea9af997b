"""Probable mistakes in a job, of which a submit warns."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.variables import literal_names
from hpc_ddp.submission.script.effect import without_effect


def find_mistakes(spec: JobSpec) -> list[str]:
    """Return warnings about probable mistakes in a job, a sentence each: a Python or module that is
    not here, a syntax error of the script where it can be read here, an array instead of a chain,
    variables that stay as they are, an interface that leads to no other node, and settings
    `without_effect`."""
    mistakes = []
    is_missing = not (spec.container or spec.image or os.path.exists(spec.python))
    if is_missing and os.path.isabs(spec.python):
        mistakes.append(f"python {spec.python} is not on this machine; is it on the nodes?")
    file, top = spec.module_file or spec.program, spec.script.partition(".")[0]
    if spec.module and not spec.module_file and Path(spec.chdir, top).is_dir():
        mistakes.append(f"there is {top}/ in {spec.chdir}, but no module {spec.script}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not spec.no_python:
                compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
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
