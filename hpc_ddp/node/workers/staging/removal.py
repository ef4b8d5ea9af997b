"""Removes the tree that ``--stage`` has made on a node, at an attempt's end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from hpc_ddp.core.attempt_env import OPENED_FILES, AttemptEnv
from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.run_folder import RunFolder

# A user's BASH_ENV, and functions that a profile exports, are not read.
STAGE_SH = ("bash", "-p", str(Path(__file__).with_name("stage.sh")))
LOCK = 9  # the descriptor by which a task of `STAGE_SH` has locked the run's folder on its node
END_S = 5.0
REMOVE_S = 20.0  # a disk under load takes some seconds to remove a tree


def leave_tree(is_hurried: bool) -> None:
    """End this node's keeper, and remove the job's tree from this node; the supervisor calls this
    at its end. With `is_hurried`, after a notice, a tree on a disk is only hidden if the job goes
    on itself (`_goes_on`): its next attempt on the node takes it back. The tree stays where another
    task uses it, or another start of the attempt follows. Without ``--stage``, whose variables are
    then missing, do nothing. Errors of a disk are passed over."""
    with suppress(KeyError, OSError):
        folder = Path(os.environ[OPENED_FILES]).parent
        is_locked = os.path.samestat(os.fstat(LOCK), folder.stat())
        _kill_child(int(os.environ["HPC_DDP_KEEPER"]))
        env = AttemptEnv.from_env(os.environ)
        if is_locked and not env.attempt_folder.port_taken.exists():
            os.close(LOCK)
            run_stage_script("hide" if is_hurried and _goes_on(env.run_folder) else "remove")


def _goes_on(run: RunFolder) -> bool:
    """Return whether this very job may start again: False for a chain, whose next job would not
    find a tree of this one, and for a run that was cancelled, which has no next start."""
    is_chain = read_json(run.job_json).get("continue_by") == "resubmit"
    return not (is_chain or run.cancelled.exists())


def _kill_child(pid: int) -> None:
    """Kill the child process `pid` and wait for its end, `END_S` at most: a process that waits for
    a disk lives on."""
    give_up = time.monotonic() + END_S
    with suppress(ChildProcessError):  # it has ended, and this process was told when it was a shell
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < give_up:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def run_stage_script(action: str) -> None:
    """Run `STAGE_SH` with `action`, as ``remove``. Wait for its end; kill it,
    with its children, after `REMOVE_S`. Its exit code does not count, and nothing is raised where
    it can't be started."""
    with suppress(OSError, subprocess.TimeoutExpired):
        shell = subprocess.Popen([*STAGE_SH, action], start_new_session=True)
        try:
            shell.wait(REMOVE_S)
        finally:
            if shell.poll() is None:  # its `rm`, too: with the lock it would hold up a later call
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait(END_S)
