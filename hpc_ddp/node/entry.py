"""Copied to ``lib/node.py`` of a run: ``python <run>/lib/node.py PART ...``.

Run by its path, so that Python looks for modules in ``lib`` first. With ``-m`` that would be the
working directory, where a user's ``json.py`` or another ``hpc_ddp`` may lie.
"""

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module(f"hpc_ddp.node.{sys.argv[1]}").main(sys.argv[2:]))
