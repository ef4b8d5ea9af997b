"""Python imports this at its start, from PYTHONPATH: it notes which files of its environment are
opened, for the parcel of ``--stage``.

A process appends each path once to the file of HPC_DDP_OPENED_FILES on its node; so do its forks.
Paths are absolute, one a line; a line ``root PATH`` is a folder of the
environment, ``python PATH`` an executable.
"""

import atexit
import importlib
import os
import sys
import time

MOST_PATHS = 50_000  # of a process: what scans an environment without end is not noted
PAUSE_S = 0.05
FILES_OF_MODULE = ("__file__", "__cached__")
EVENTS = frozenset(("open", "os.listdir", "os.scandir"))


def roots() -> list[str]:
    """Return the folders of this Python's environment; those of the system are not among them."""
    sites = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    folders = dict.fromkeys([sys.prefix, sys.base_prefix, sys.exec_prefix, *sites])
    return [path for path in folders if not is_of_system(path)]


def is_of_system(path: str) -> bool:
    """Return whether a folder is the operating system's, which lies on each node."""
    is_usr = path == "/usr" or (path.startswith("/usr/") and not path.startswith("/usr/local/"))
    return is_usr or path in ("/", "/usr/local") or not path.startswith("/")


def note_files(record: str) -> None:
    """Have this process append to the file `record` what it has opened of its environment, and what
    it will, every `PAUSE_S`. No error of that disk reaches the program."""
    folders = roots()
    beginnings = tuple(f"{folder}/" for folder in folders)
    modules = [*sys.modules.values()]
    files = {getattr(module, name, None) for module in modules for name in FILES_OF_MODULE}
    noted = {path for path in files if type(path) is str and path.startswith(beginnings)}
    pythons = {sys.executable, getattr(sys, "_base_executable", "")}
    lines = [f"root {path}" for path in folders] + [f"python {path}" for path in pythons]
    lines += sorted(noted)
    due = 0.0

    def append() -> None:
        nonlocal due
        due = time.monotonic() + PAUSE_S
        text = "\n".join([*lines, ""]).encode(errors="surrogateescape")
        lines.clear()
        try:  # opened each time: a program may close descriptors that are not its own
            file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            os.write(file, text)
            os.close(file)
        except OSError:
            pass

    def note(event: str, args: tuple[object, ...]) -> None:
        path = args[0] if event in EVENTS and len(noted) < MOST_PATHS else None
        if type(path) is str and path not in noted and path.startswith(beginnings):
            noted.add(path)
            lines.append(path)
        if lines and time.monotonic() > due:  # also at an event of another kind: some come always
            append()

    append()
    sys.addaudithook(note)
    atexit.register(append)


def step_aside() -> None:
    """Import the environment's own ``sitecustomize`` in place of this one, if it has one."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


if __name__ == "sitecustomize":
    if _record := os.environ.get("HPC_DDP_OPENED_FILES"):
        note_files(_record)
    step_aside()
