"""Copied to ``lib/node.py`` of a run: ``python <run>/lib/node.py PART ...``.

Run by its path, so that Python looks for modules in ``lib`` first. With ``-m`` that would be the
working directory, where a user's ``json.py`` or another ``hpc_ddp`` may lie.
"""

import contextlib
import importlib
import os
import signal
import stat
import sys


def refuse_old_python() -> None:
    """Print that this Python is too old, and exit with code 1. In a supervisor, or torchrun's
    agent, first write the reason into a file of the node's folder, where the verdict finds it;
    without that file the verdict would see a lost node again and again. Raise KeyError where a
    variable of the job is missing, OSError where the file can't be written."""
    import json
    import time

    version = ".".join(map(str, sys.version_info[:2]))
    error = f"Python {version} is too old; accepted for --python: 3.10 or later"
    part, env = sys.argv[1], os.environ
    if part == "elastic_agent":
        with open(os.path.join(env["HPC_DDP_NODE_FOLDER"], "failures.json"), "w") as file:
            json.dump({"agent": error}, file)
    elif part == "supervisor":
        node, attempt = env["SLURMD_NODENAME"], "attempt-" + env["HPC_DDP_ATTEMPT"]
        folder = os.path.join(env["HPC_DDP_RUN"], "logs", attempt, node)
        os.makedirs(folder, 0o755, exist_ok=True)
        task = "-" + env["SLURM_PROCID"] if sys.argv[2] == "worker" else ""
        failure = {"rank": None, "code": 1, "time": time.time(), "error": error}
        with open(os.path.join(folder, "record" + task + ".json"), "w") as file:
            json.dump({"node": node, "code": 1, "failures": [failure]}, file)
    sys.exit("hpc-ddp: " + error)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036  # of the job, on which this file alone can run
        refuse_old_python()
    # A group that may read a run is not to write in it, whatever the user's umask: the next attempt
    # executes what lies there. A worker gets the user's umask back, for the files of the script.
    umask = os.umask(0o022)
    os.umask(umask | 0o022)
    os.environ.setdefault("HPC_DDP_UMASK", f"{umask:o}")
    if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves this file's folder out
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    # Python would look in this folder, on the shared disk, for each module of its library first. So
    # the folder, sys.path[0], goes behind the leading entries that are Python's own library, and
    # stays before all others, such as one with another hpc_ddp.
    library, place = os.path.dirname(os.__file__).rpartition(".")[0], 1
    for path in sys.path[1:]:
        if not path.startswith(library) or "-packages" in path:
            break
        place += 1
    sys.path.insert(place - 1, sys.path.pop(0))
    if sys.argv[1] == "batch":  # Slurm may signal all processes at a preemption, or a requeue
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Of the batch script: the number of its tries, and a pipe for the word that this one succeeds.
    number, loaded = (os.environ.pop(f"HPC_DDP_{name}", "") for name in ("TRY", "LOADED"))
    try:
        part = importlib.import_module(f"hpc_ddp.node.{sys.argv[1]}")
    except (ModuleNotFoundError, OSError) as error:
        if sys.argv[1] != "batch":
            raise
        if number == "0":
            print(f"hpc-ddp: its part can't be loaded yet: {error}", file=sys.stderr)
        sys.exit(111)  # the disk is away: the batch script calls again
    if loaded:
        with contextlib.suppress(OSError):  # a Python that is a wrapper may not have it
            if stat.S_ISFIFO(os.fstat(int(loaded)).st_mode):
                os.write(int(loaded), b"yes")
                os.close(int(loaded))
    outcome = part.main(sys.argv[2:])
    if isinstance(outcome, int):
        sys.exit(outcome)
    # A forked worker: its script runs here, below no frame but this one, and has this module
    # without the names above: Python ends what the first __main__ has before other modules.
    with outcome:
        exec(outcome.code, outcome.fill_main())
