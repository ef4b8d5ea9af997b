"""Removes what ``--stage`` has made: a node's tree at an attempt's end, and a run's parcel."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpc_ddp.core.attempt_env import OPENED_FILES, AttemptEnv
from hpc_ddp.core.run_folder import RunFolder

PARCEL = "stage"  # a folder of the run
SCRIPT = Path(__file__).with_name("stage.sh")
LOCK = 9  # the descriptor by which a task of `SCRIPT` has locked the run's folder on its node
REMOVE_S = 60.0
REFUSED = "an attempt has ended before its first step from the copy of --stage"


@contextmanager
def leaving_tree() -> Iterator[None]:
    """End this node's keeper, and remove what the run has on this node, after the block, the work
    of a supervisor; unless another task uses it, or another start of the attempt follows. Nothing
    is raised for a disk."""
    try:
        yield
    finally:
        with suppress(KeyError, OSError):
            folder = Path(os.environ[OPENED_FILES]).parent
            is_locked = os.path.samestat(os.fstat(LOCK), folder.stat())
            _end_child(int(os.environ["HPC_DDP_KEEPER"]))
            attempt = AttemptEnv.from_env(os.environ).attempt_folder
            if is_locked and not attempt.port_taken.exists():
                os.close(LOCK)
                _call("remove")


def _end_child(pid: int) -> None:
    with suppress(ChildProcessError):  # it has ended, and the shell before this Python knew
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def remove_leftovers(own_folder: Path) -> None:
    """Remove the folders on this node of tasks that were killed, of any run: those that no task has
    locked and that were not changed for an hour. `own_folder` stays, as it is locked."""
    _call("clean")


def remove_parcel(run: RunFolder, is_refused: bool = False) -> None:
    """Remove the parcel of a run, for a task that of its array; nothing is raised for a disk. With
    `is_refused` later attempts make no other one."""
    parcel = run.whole / PARCEL
    shutil.rmtree(parcel, ignore_errors=True)
    if is_refused:
        with suppress(OSError):
            parcel.mkdir(mode=0o700, exist_ok=True)
            (parcel / "refused").write_text(f"{REFUSED} (to allow it again: rm -r {parcel})")


def _call(action: str) -> None:
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["bash", str(SCRIPT), action], timeout=REMOVE_S, check=False)
