"""The preflight without a job: its checks alone, in an allocation, or a first training."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_ddp.core.accelerators import SHOW_DEVICES, VENDORS, device_files, listed_devices
from hpc_ddp.core.attempt_env import allocation_env
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.journal.events import PreflightEnded
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.submission.package_files import PACKAGE, folder
from hpc_ddp.submission.plan import PreparedRun, plan_new
from hpc_ddp.submission.settings.config import Settings

TEMPLATE = "preflight.sh.j2"
NAME = "preflight"


def run_checks(settings: Settings, cwd: Path, root: Path) -> PreflightEnded:
    """Run the checks of `node.preflight` on all nodes of this allocation, and wait for the end;
    return the event with their result, also where nodes are bad.

    The checks' output goes to stderr. A run's folder, by which the nodes find that they share a
    disk, is made and removed again, also after an error. `settings` may name a site, and options
    of Slurm; those of a single job are not used (`_values`). `cwd` is the folder that relative
    paths of the settings are seen from, `root` the folder of all runs.

    Raises
    ------
    UsageError
        this is not inside an allocation, a setting is refused, or the folder can't be written
    HpcDdpError
        the checks ended without a result
    OSError
        the script can't be written or started, or the journal can't be read
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise UsageError(
            "preflight tests the nodes of an allocation, and this shell is in none",
            hint="salloc --nodes 2 hpc-ddp preflight, or hpc-ddp submit --preflight …",
        )
    values = _values(settings) | {"job-name": NAME, "snapshot": False, "preflight": True}
    # A run needs a script, which is never started here.
    values["script"] = str(PACKAGE / "node" / "preflight" / "bandwidth.py")
    prepared = plan_new(Settings(values), cwd, root).write()
    run = prepared.run
    try:
        spec = replace(prepared.spec, template=str(folder("templates") / TEMPLATE))
        run.script.write_text(replace(prepared, spec=spec).rendering.text())
        code = subprocess.run(["bash", str(run.script)], stdout=sys.stderr).returncode
        event = last_event(run.events(), PreflightEnded)
    finally:
        prepared.discard()
        with contextlib.suppress(OSError):  # the folder has other runs of the name
            run.path.parent.rmdir()
    if event is None:
        raise HpcDdpError(f"the preflight ended with exit code {code}", hint="see what it printed")
    return event


def write_trial_job(settings: Settings, cwd: Path, root: Path) -> PreparedRun:
    """Write a run whose training tries each feature once, and return it, ready to start. It uses
    all nodes of this allocation, or outside of an allocation this machine.

    The number of GPUs of a node is the allocation's, else the settings', else, outside of an
    allocation, the number that this machine has. Without GPUs two workers per node train on the
    CPU. The variable `SHOW_DEVICES` is set in this process: its later runs may use accelerators,
    too. `cwd` and `root` are as in `run_checks`.

    Raises
    ------
    UsageError
        a setting is refused, or the run's folder can't be written
    """
    os.environ.setdefault(SHOW_DEVICES, "1")  # a dry run has none; this run is to test them
    values = _values(settings) | {"job-name": "first-contact", "max-restarts": 8}
    if "SLURM_JOB_ID" in os.environ:
        nodes = allocation_env(os.environ).get("SLURM_NNODES", "1")
        values |= {"backend": "salloc", "nodes": nodes}
    else:
        values["backend"] = "local"
        values["gpus-per-node"] = values["gpus-per-node"] or str(count_devices())
    values |= {"launcher": "torchrun", "elastic": False}
    if values["gpus-per-node"] in (None, "0", 0):
        values |= {"gpus-per-node": None, "nproc-per-node": 2}
    else:
        values["nproc-per-node"] = None
    values["script"] = str(folder("jobs") / "preflight_train.py")
    return plan_new(Settings(values), cwd, root).write()


def count_devices() -> int:
    """Return how many accelerators this machine has, of the vendor with most; 0 without any.
    Accelerators that a variable of this process hides (as CUDA_VISIBLE_DEVICES) do not count."""
    counts = [  # by vendor: all devices, or the fewest that one of its variables leaves
        min([count, *listed_devices(VENDORS[name], os.environ).values()])
        for name, count in device_files().items()
    ]
    return max(counts, default=0)


def read_table(prepared: PreparedRun) -> str:
    """Return the table of features, a text in Markdown, that the workers of a run of
    `write_trial_job` have written. Raise HpcDdpError where they wrote none, and OSError where
    it can't be read."""
    path = prepared.run.path / "first-contact.md"
    if not path.exists():
        raise HpcDdpError(
            "no feature was tried: the workers ended before",
            hint=f"hpc-ddp explain {prepared.run.quoted}",
        )
    return path.read_text()


def _values(settings: Settings) -> dict[str, Any]:
    """Return the settings by key, without those of a single job (`of_single_jobs`).
    ``gpus-per-node`` is the number of this allocation, else of the settings, else None."""
    of_single_jobs = ("array", "args", "continue-by", "nodes", "stage", "template")
    values = {key: value for key, value in settings.values.items() if key not in of_single_jobs}
    gpus = os.environ.get("SLURM_GPUS_PER_NODE") or values.get("gpus-per-node")
    return {**values, "gpus-per-node": gpus}
