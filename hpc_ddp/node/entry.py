"""Copied to ``lib/node.py`` of a run: ``python <run>/lib/node.py PART ...``.

Run by its path, so that Python looks for modules in ``lib`` first. With ``-m`` that would be the
working directory, where a user's ``json.py`` or another ``hpc_ddp`` may lie.
"""

import importlib
import os
import sys

if __name__ == "__main__":
    # A group that may read a run is not to write in it, whatever the user's umask: the next attempt
    # executes what lies there. A worker gets the user's own back, for the files of the script.
    umask = os.umask(0o022)
    os.umask(umask | 0o022)
    os.environ.setdefault("HPC_DDP_UMASK", f"{umask:o}")
    if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves this file's folder out
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    # Python would look in this folder, on the shared disk, for each module of its library first. It
    # stays before whatever else is not Python's own, such as another hpc_ddp.
    library, place = os.path.dirname(os.__file__).rpartition(".")[0], 1
    for path in sys.path[1:]:
        if not path.startswith(library) or "-packages" in path:
            break
        place += 1
    sys.path.insert(place - 1, sys.path.pop(0))
    ended = importlib.import_module(f"hpc_ddp.node.{sys.argv[1]}").main(sys.argv[2:])
    if isinstance(ended, int):
        sys.exit(ended)
    # A forked worker: its script runs here, below no frame but this one.
    try:
        exec(ended.code, vars(ended.module))
    except SystemExit:
        raise
    except BaseException as error:
        ended.report(error)
        raise
