"""Python imports this at its start, from PYTHONPATH: it notes the files of the environment that the
process opens, for the parcel of ``--stage``.

A process appends each path once to the file of HPC_DDP_OPENED_FILES on its node; so do its forks.
Paths are absolute, one a line; a line ``root PATH`` is a folder of the environment, ``python PATH``
an executable, ``written PATH`` a file that was opened to be written. Each Python that a job starts
reads this file, so its syntax is that of 3.4; those before 3.8 note nothing.

An audit hook can't be removed, and makes ``id()`` ten times as slow for good. So a process of an
attempt that has started from a copy, in which few files are missing, has no such hook: it notes
only the files that Python's own imports read, and no data files.
"""

import atexit
import importlib
import os
import sys
import time

TYPE_CHECKING = False  # typing itself is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_PATHS = 50000  # of a process: a program may scan an environment without end
MOST_BYTES = 64 << 20  # of the file: a job may start processes without end
PAUSE_S = 0.05
FILES_OF_MODULE = ("__file__", "__cached__")
EVENTS = frozenset(("open", "os.listdir", "os.scandir"))
WRITING = os.O_WRONLY | os.O_RDWR


def roots() -> "list[str]":
    """Return the folders of this Python's environment, each once, without those of the operating
    system."""
    folders = [sys.prefix, sys.base_prefix, sys.exec_prefix]
    folders += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return [path for path in dict.fromkeys(folders) if not is_of_system(path)]


def is_of_system(path: str) -> bool:
    """Return whether a folder is the operating system's, which each node has: a folder in /usr, but
    not one below /usr/local. True also for a path that is not absolute."""
    is_usr = path == "/usr" or (path.startswith("/usr/") and not path.startswith("/usr/local/"))
    return is_usr or path in ("/", "/usr/local") or not path.startswith("/")


def note_files(record: str, has_copy: bool = False) -> None:
    """Append to the file `record` this Python's roots and executables, and the files of the modules
    that are imported by now; from now on append each further path of the environment that the
    process opens or lists, at most once in `PAUSE_S`, and at the exit. This adds an audit hook to
    the process. Where the process runs from a copy (`has_copy`), it patches Python's importer
    instead: only files of imports are noted, and at once. Errors of the record's disk are passed
    over."""
    folders = roots()
    beginnings = tuple(folder + "/" for folder in folders)
    modules = list(sys.modules.values())
    files = {getattr(module, name, None) for module in modules for name in FILES_OF_MODULE}
    noted = {path for path in files if type(path) is str and path.startswith(beginnings)}
    pythons = {sys.executable, getattr(sys, "_base_executable", "")}
    lines = ["root " + path for path in folders] + ["python " + path for path in pythons]
    lines += sorted(noted)
    due = 0.0

    def append() -> None:
        """Append the new lines to the record and forget them, even where the record is full or its
        disk refuses. The next lines are due after `PAUSE_S`, with a copy at once."""
        nonlocal due
        due = time.monotonic() + (0.0 if has_copy else PAUSE_S)  # the next import may be far
        count = len(lines)  # another thread may add some meanwhile
        text = "".join(line + "\n" for line in lines[:count]).encode(errors="surrogateescape")
        del lines[:count]
        try:  # opened each time: a program may close descriptors that are not its own
            file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        except OSError:
            return
        try:
            if os.fstat(file).st_size < MOST_BYTES:
                os.write(file, text)
        except OSError:
            pass
        finally:
            os.close(file)

    def note(event: str, args: "tuple[object, ...]") -> None:
        """Handle an audit event: note a line if the event opens or lists a new path of the
        environment, and `append` the new lines if they are due."""
        path = args[0] if event in EVENTS and len(noted) < MOST_PATHS else None
        if type(path) is str and path.startswith(beginnings):
            flags = args[2] if event == "open" and len(args) == 3 else 0
            line = "written " + path if type(flags) is int and flags & WRITING else path
            if line not in noted:
                noted.add(line)
                lines.append(line)
        if lines and time.monotonic() >= due:  # at any event, since lines may wait for one
            append()

    append()
    if has_copy:
        try:
            note_imports(note)
        except AttributeError:  # a Python that has changed its importer
            sys.addaudithook(note)
    else:
        sys.addaudithook(note)
    atexit.register(append)


def note_imports(note: "Callable[[str, tuple[object, ...]], None]") -> None:
    """Patch Python's importer: it calls `note`, a handler of audit events, for each file with code
    that it reads, and each folder that it lists. Raise AttributeError in a Python whose importer
    is another."""
    external = sys.modules["_frozen_importlib_external"]
    loader, finder = external.FileLoader, external.FileFinder
    read, fill = loader.get_data, finder._fill_cache

    def get_data(self: "Any", path: str) -> "Any":
        """Note a file with code, and return its bytes."""
        note("open", (path,))
        return read(self, path)

    def fill_cache(self: "Any") -> None:
        """Note the folder of a finder, and have the finder list it."""
        note("os.listdir", (self.path,))
        fill(self)

    loader.get_data, finder._fill_cache = get_data, fill_cache


def step_aside() -> None:
    """Remove this module's folder from ``sys.path``, and import the environment's own
    ``sitecustomize``, if there is one, in place of this module. Raise what that import raises."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


if __name__ == "sitecustomize":
    if "HPC_DDP_OPENED_FILES" in os.environ and hasattr(sys, "addaudithook"):
        note_files(os.environ["HPC_DDP_OPENED_FILES"], "HPC_DDP_NEAR" in os.environ)
    step_aside()
