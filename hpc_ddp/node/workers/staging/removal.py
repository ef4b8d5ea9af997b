"""Removes what ``--stage`` has left on nodes: at the end of a run, and of runs that were killed.

``python <run>/lib/node.py workers.staging.removal``, the last call of the batch script.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.journal.events import Started, VerdictGiven
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import describe_work, is_final, read_queue

PARCEL = "stage"  # a folder of the run
SCRIPT = Path(__file__).with_name("stage.sh")
UNUSED_S = 7 * 86400.0
REMOVE_S = 20.0


def main(argv: Sequence[str]) -> int:
    """Run `remove_of_run` for the run of the environment; raise KeyError without one."""
    remove_of_run(AttemptEnv.from_env(os.environ).run_folder, os.environ)
    return 0


def remove_of_run(run: RunFolder, environ: Mapping[str, str]) -> None:
    """Remove what a run has on the nodes of its job, unless another attempt follows by itself; of a
    finished run, which is no task of an array, also the parcel. Nothing is raised for a disk."""
    with suppress(OSError, subprocess.SubprocessError):
        verdict = last_event(run.events(), Started, VerdictGiven)
        if not isinstance(verdict, VerdictGiven) or not is_final(verdict):
            return
        if verdict.exit_code == 0 and not run.is_task:
            shutil.rmtree(run.path / PARCEL, ignore_errors=True)
        command = ["bash", str(SCRIPT), "remove"]
        subprocess.run(command, timeout=REMOVE_S, check=False)
        nodes = environ.get("SLURM_NNODES", "1") if "SLURM_JOB_ID" in environ else "1"
        if nodes != "1":
            size = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
            command = ["srun", *size, "--overlap", "--mpi=none", "--quiet", *command]
            subprocess.run(command, timeout=REMOVE_S, check=False, stderr=subprocess.DEVNULL)


def remove_leftovers(own_folder: Path) -> None:
    """Remove the folders on this node of runs that are over: of a job that was killed with its
    batch script, above all. One that a task uses stays, and `own_folder`."""
    places = dict.fromkeys([os.environ.get("TMPDIR") or "/tmp", "/tmp", "/dev/shm"])
    for place in places:
        top = Path(place, f"hpc-ddp-near-{os.geteuid()}")
        with suppress(OSError):
            if top.is_symlink() or top.stat().st_uid != os.geteuid():
                continue
            for folder in top.iterdir():
                if folder != own_folder:
                    remove_leftover(folder)


def remove_leftover(folder: Path) -> None:
    """Remove the folder of a run, unless a task of this node uses it or the run goes on. Raise
    OSError where that can't be known."""
    with open(folder / "used", "ab") as used:
        try:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        path = Path((folder / "run").read_text())
        is_old = time.time() > (folder / "run").stat().st_mtime + UNUSED_S
        if is_old or (path.parent.is_dir() and is_over(RunFolder(path))):
            shutil.rmtree(folder, ignore_errors=True)


def is_over(run: RunFolder) -> bool:
    """Return whether nothing goes on with a run; raise OSError where that can't be read."""
    return not run.path.is_dir() or describe_work(run, read_queue()) is None
