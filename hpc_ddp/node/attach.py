"""On a worker's node: runs a command in the worker's environment, or prints its threads' stacks.

``python <run>/lib/node.py attach <attempt>/<node>/rank-<r>.pid (stacks | run COMMAND…)``
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.variables import OF_A_RANK
from hpc_ddp.core.process import (
    SHOW_STACKS,
    STACKS,
    children_by_parent,
    handles_signal,
    is_memory_file,
    live_pid,
    may_hide,
    proc_text,
)

ANSWER_S = 5.0  # how long a signalled worker is given
# The variables that make a process a rank of the training. An attached command gets none of them:
# a script that is tried in a shell must neither join the training nor write into the attempt.
_LEFT_OUT = re.compile(rf"{OF_A_RANK}|HPC_DDP_(?!(RUN|CODE)$)\w+")


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which the process `pid` was started, {} for a zombie; raise
    OSError if the process is gone or another user's."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def worker_of(pid_file: Path) -> int:
    """Return the process id of the worker that a file ``rank-<r>.pid`` names. Where that process
    only waits for a command (``--no-python``), return the id of the nearest process below it that
    has called `start`, or of the command if none has.

    Raises
    ------
    HpcDdpError
        this host has no such process: it has not started yet, has ended, or can't be seen from here
    OSError
        it has ended meanwhile
    """
    pid = live_pid(pid_file)
    if pid is None:
        but = ", or one in a container that can't be seen from here" if may_hide(pid_file) else ""
        raise HpcDdpError(f"{pid_file.stem} has no process on {os.uname().nodename} now{but}")
    if not re.search("/workers/program.py\0command\0", proc_text(pid, "cmdline")):
        return pid
    processes = [*_below(pid), pid]
    return next(filter(_has_stacks, processes), processes[0])


def _below(pid: int) -> list[int]:
    """Return the ids of all processes below the process `pid`: its children, then theirs, and so
    on."""
    children = children_by_parent()
    below = list(children.get(pid, []))
    for descendant in below:  # the list grows in the loop, which so visits all generations
        below += children.get(descendant, [])
    return below


def _has_stacks(pid: int) -> bool:
    """Return whether a process has a file of `_stacks_file`, so that it can write its own stacks;
    False once it is gone."""
    with suppress(OSError):
        return _stacks_file(pid) is not None
    return False


def run_command(pid: int, command: list[str]) -> None:
    """Replace this process by `command`, in the working directory and environment of the worker
    with the process id `pid`, with the user's umask; never return.

    Left out are the variables that make a process a rank of the training, and all of hpc-ddp's but
    HPC_DDP_RUN and HPC_DDP_CODE; TERM is that of this process. Raise HpcDdpError if the command
    can't be started, OSError if the worker has ended or is another user's.
    """
    variables = environment_of(pid).items()
    environ = {name: text for name, text in variables if not _LEFT_OUT.fullmatch(name)}
    environ["TERM"] = os.environ.get("TERM", "dumb")
    os.chdir(os.readlink(f"/proc/{pid}/cwd"))
    if "HPC_DDP_UMASK" in os.environ:
        os.umask(int(os.environ["HPC_DDP_UMASK"], 8))
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise HpcDdpError(f"{command[0]} can't be started: {error.strerror}") from None


def print_stacks(pid: int) -> None:
    """Print to stdout the place in the code where each thread of the worker `pid` is: by py-spy, or
    else by the worker itself, which gets the signal `SHOW_STACKS` if it handles that.

    Raises
    ------
    HpcDdpError
        no py-spy may look, and the script has not called hpc_ddp's start; or the worker did not
        answer within `ANSWER_S`
    OSError
        the worker has ended or is another user's
    """
    python = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    places = (os.path.dirname(python), *environment_of(pid).get("PATH", "").split(":"))
    # A relative path would lead below this process's working directory, maybe another user's.
    py_spy = shutil.which("py-spy", path=":".join(filter(os.path.isabs, places)))
    if py_spy and subprocess.run([py_spy, "dump", "--pid", str(pid)]).returncode == 0:
        return
    stacks_file = _stacks_file(pid)
    if stacks_file is None or not handles_signal(pid, SHOW_STACKS):
        why = "py-spy may not look at it" if py_spy else f"there is no py-spy beside {python}"
        raise HpcDdpError(
            f"{why}, and a script that has not called hpc_ddp's start can't tell by itself",
            hint=f"{python} -m pip install py-spy",
        )
    old_size = stacks_file.stat().st_size
    os.kill(pid, SHOW_STACKS)
    give_up, size = time.monotonic() + ANSWER_S, old_size
    # Until the worker has written, and the file has not grown for 0.1 s.
    while size == old_size or size != stacks_file.stat().st_size:
        if time.monotonic() > give_up:
            raise HpcDdpError(f"process {pid} gave no answer within {ANSWER_S:.0f} s")
        size = stacks_file.stat().st_size
        time.sleep(0.1)
    sys.stdout.buffer.write(stacks_file.read_bytes()[old_size:])


def _stacks_file(pid: int) -> Path | None:
    """Return the file in memory into which a worker writes its stacks, as a path through the
    worker's descriptors; None where its script has not called `start`.

    Raise OSError if the process is gone or another user's.
    """
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if is_memory_file(path, STACKS):
                return path
        except OSError:  # closed meanwhile
            continue
    return None


def main(words: list[str]) -> int:
    """Attach to the worker that `words` name: its pid file, then ``stacks``, or ``run`` and a
    command.

    Return 0, or 1 after an HpcDdpError or OSError, which is printed to stderr. With ``run`` this
    does not return if the command starts: it replaces this process.
    """
    pid_file, mode, *command = words
    try:
        pid = worker_of(Path(pid_file))
        print_stacks(pid) if mode == "stacks" else run_command(pid, command)
    except (HpcDdpError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, HpcDdpError) and error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1
    return 0
