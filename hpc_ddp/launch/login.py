"""Asks this login node what its cluster is like. Nothing but the controller need answer."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpc_ddp import slurm
from hpc_ddp.launch.detect import Facts

# Sites' own names for a disk that all nodes see, the fastest first. Those of a node's own disk,
# such as SLURM_TMPDIR, mean nothing here.
SCRATCH = ("SCRATCH", "PSCRATCH", "CINECA_SCRATCH", "FAST", "WORK", "GROUP_SCRATCH")
CONTAINERS = ("apptainer", "singularity", "shifter", "podman-hpc")
MODULES_S = 10.0  # a large tree of modules on a slow disk is not waited for


def look(environ: Mapping[str, str]) -> Facts:
    """Return all that follows from asking.

    Raises
    ------
    HpcDdpError
        there is no Slurm here, or its controller does not answer
    """
    return Facts(
        config=slurm.show_config(),
        partitions=slurm.show_all("partition"),
        nodes=slurm.show_all("node"),
        qos=slurm.show_qos(),
        accounts=slurm.show_accounts(getpass.getuser()),
        scratch=_scratch(environ),
        runs=environ.get("HPC_DDP_RUNS", ""),
        containers=_containers(),
        modules=_modules(environ),
    )


def _scratch(environ: Mapping[str, str]) -> list[tuple[str, str, bool]]:
    named = [(name, environ[name]) for name in SCRATCH if environ.get(name)]
    return [(name, path, Path(path).is_dir() and os.access(path, os.W_OK)) for name, path in named]


def _containers() -> list[str]:
    pyxis = ["pyxis"] if slurm.takes_option("srun", "container-image") else []
    return [name for name in CONTAINERS if shutil.which(name)] + pyxis


def _modules(environ: Mapping[str, str]) -> list[str] | None:
    """Return the modules with torch in their name; None where the shell has no `module`."""
    if not {"LMOD_CMD", "MODULESHOME", "MODULEPATH"} & set(environ):
        return None
    asked = "module --terse avail 2>&1"
    # `module` is a function, which shells that read a profile define; it may be exported, too.
    argv = ["bash", "-c" if "BASH_FUNC_module%%" in environ else "-lc", asked]
    printed = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        printed = subprocess.run(
            argv, env=dict(environ), capture_output=True, text=True, timeout=MODULES_S
        ).stdout
    words = (line.strip() for line in printed.splitlines())
    found = [re.sub(r"\((default|\w)\)$", "", word) for word in words if "torch" in word.lower()]
    return [word for word in found if word and not re.search(r"[\s:]|/$", word)]
