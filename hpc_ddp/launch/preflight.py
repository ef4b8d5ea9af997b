"""The preflight by hand, inside an allocation: a run of nothing but its preflight."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from hpc_ddp.launch.config import Settings
from hpc_ddp.launch.prepare import new_run
from hpc_ddp.launch.resources import PACKAGE, folder
from hpc_ddp.run.errors import HpcDdpError, UsageError
from hpc_ddp.run.journal import Event, last_event

TEMPLATE = "preflight.sh.j2"
NAME = "preflight"


def look(settings: Settings, cwd: Path, root: Path) -> Event:
    """Look at all nodes of this allocation; return the event `preflight`.

    The run's folder, in which the nodes look whether they share a disk, is taken away again.

    Raises
    ------
    UsageError
        this is not inside an allocation
    HpcDdpError
        the preflight came to no end
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise UsageError(
            "preflight looks at the nodes of an allocation, and this shell is in none",
            hint="salloc --nodes 2 hpc-ddp preflight, or hpc-ddp submit --preflight …",
        )
    of_jobs = ("array", "args", "continue-by", "nodes", "template")
    values = {key: value for key, value in settings.values.items() if key not in of_jobs}
    gpus = os.environ.get("SLURM_GPUS_PER_NODE") or values.get("gpus-per-node")
    values |= {"job-name": NAME, "snapshot": False, "gpus-per-node": gpus, "preflight": True}
    # A run has a script; this one's is the part of the preflight that needs torch.
    values["script"] = str(PACKAGE / "node" / "bandwidth.py")
    prepared = new_run(Settings(values), cwd, root)
    run = prepared.run
    try:
        spec = replace(prepared.spec, template=str(folder("templates") / TEMPLATE))
        run.script.write_text(replace(prepared, spec=spec).rendering.whole())
        code = subprocess.run(["bash", str(run.script)], stdout=sys.stderr).returncode
        event = last_event(run.events(), "preflight")
    finally:
        prepared.discard()
        with contextlib.suppress(OSError):
            run.path.parent.rmdir()
    if event is None:
        raise HpcDdpError(f"the preflight ended with exit code {code}", hint="see what it printed")
    return event
