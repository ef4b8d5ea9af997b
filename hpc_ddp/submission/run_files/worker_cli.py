"""The commands of hpc-ddp, where a run's own part of hpc-ddp comes first in Python's path.

This file is ``hpc_ddp/cli/__init__.py`` in the ``lib`` of a run, which carries no commands: a
script that calls ``hpc-ddp submit`` in a worker gets the installed ones.
"""

import importlib
import os
import sys

_LIB = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OF_RUN = {_LIB, os.environ.get("HPC_DDP_CODE", _LIB)}


def hand_over() -> None:
    """Import the installed ``hpc_ddp.cli`` in place of this package. The run's library and code are
    taken out of ``sys.path``, and of PYTHONPATH for the commands' processes; all modules of hpc_ddp
    are forgotten. End with an error and a hint (SystemExit) where no commands are installed."""
    folders = os.environ.get("PYTHONPATH", "").split(":")
    os.environ["PYTHONPATH"] = ":".join(path for path in folders if path not in _OF_RUN)
    sys.path[:] = [path for path in sys.path if path not in _OF_RUN]
    for name in [name for name in sys.modules if name.partition(".")[0] == "hpc_ddp"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        importlib.import_module("hpc_ddp.cli.main")
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: hpc-ddp is not installed for {sys.executable}: {error}\n"
            "hint: call it by its path, as /path/to/env/bin/hpc-ddp"
        )


if os.path.exists(os.path.join(_LIB, "node.py")):  # in a run's library; not in hpc-ddp itself
    hand_over()
