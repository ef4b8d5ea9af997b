"""A job's program that is no script: it becomes a module, as by ``python -m``, or a command.

``program.py module FOLDER NAME ARGS…``: Python looks in FOLDER first, as ``python -m`` does in the
working directory; it is that folder's copy in the run.
``program.py command NAME ARGS…``: found by PATH, else beside this Python, as in an environment that
is not activated.
"""

import os
import runpy
import shutil
import sys
from typing import NoReturn


def run_module(folder: str, name: str, *args: str) -> None:
    """Run the module `name`, looked for in `folder` first, as ``__main__`` with arguments; raise
    ImportError without one, and whatever it raises."""
    sys.path.insert(0, folder)
    sys.argv[:] = [name, *args]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_command(name: str, *args: str) -> NoReturn:
    """Replace this process by a command; exit with a message and a shell's code, 126 or 127, where
    it can't be started."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # as a script has it by python -u
    path = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable)) or name
    try:
        os.execvp(path, [name, *args])
    except OSError as error:
        print(f"hpc-ddp: {name} can't be started: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # not with PYTHONSAFEPATH
        del sys.path[0]
    if sys.argv[1] == "module":
        run_module(*sys.argv[2:])
    else:
        run_command(*sys.argv[2:])
