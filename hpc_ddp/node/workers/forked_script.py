"""A forked process that becomes what ``python -u SCRIPT ARGS`` would be."""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import io
import multiprocessing
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from hpc_ddp.core.process import keep_folder_out

PR_SET_MM, PR_SET_MM_MAP = 35, 14
LIB = str(Path(__file__).parents[3])  # the folder of node.py and its package
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]  # an excepthook
# Fields of /proc/self/stat (man 5 proc) for `struct prctl_mm_map`, up to the start of the stack.
FIRST_FIELD = 3
CODE, DATA, BREAK, STACK = (26, 27), (45, 46), 47, 28


@dataclass
class ForkedScript:
    """A script, compiled. node.py runs it at its own top level, so that tracebacks have no other
    frame of hpc-ddp, in a ``with`` block of this object, which takes that frame away where the
    script ends by an exception."""

    code: CodeType

    @classmethod
    def become(cls, command: list[str]) -> ForkedScript:
        """Change this process into the process that `command` would start (python, its options, the
        script and its arguments), and return the script, which the caller has to run.

        The script gets its own ``sys.argv`` and ``sys.path``; other processes see its command line
        and environment; generators of random numbers are seeded anew. Raise OSError if the script
        can't be read, SyntaxError or ValueError if it is no Python.
        """
        python, *words = command
        start = next(place for place, word in enumerate(words) if not word.startswith("-"))
        script, argv = words[start], words[start:]
        with io.open_code(os.path.abspath(script)) as file:
            code = compile(file.read(), os.path.abspath(script), "exec", dont_inherit=True)
        name_process([python, *words])
        sys.argv[:] = argv
        sys.orig_argv[:] = command
        sys.path[:] = search_path(script)
        importlib.invalidate_caches()
        keep_folder_out()
        _seed_anew()
        thread: Any = threading.main_thread()
        if hasattr(thread, "_set_native_id"):  # which a fork changes, and Python does not look at
            thread._set_native_id()
        if "logging" in sys.modules:  # of %(relativeCreated)d, from Python 3.13 on in nanoseconds
            names = vars(sys.modules["logging"])
            is_whole = isinstance(names["_startTime"], int)
            names["_startTime"] = time.time_ns() if is_whole else time.time()
        return cls(code)

    def fill_main(self) -> dict[str, Any]:
        """Empty the module ``__main__`` of this process, give it the names that it has when the
        script begins, and return these: its globals. Nothing of node.py may stay there, since
        objects of the script would end with it, too late to close their files."""
        names = vars(sys.modules["__main__"])
        has_annotations = "__annotations__" in names  # up to Python 3.13
        path = self.code.co_filename
        names.clear()
        names.update(
            vars(ModuleType("__main__")),
            __loader__=SourceFileLoader("__main__", path),
            **({"__annotations__": {}} if has_annotations else {}),
            __builtins__=builtins,
            __file__=path,
            __cached__=None,
        )
        return names

    def __enter__(self) -> None:
        """Begin the block in which the script runs."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Have Python print an `error` that has ended the script, if it is none that only ends the
        process, without the frame of node.py (`_show`). Python itself calls ``sys.excepthook``
        behind the block. Nothing here refers to the error, which keeps the script's objects."""
        if error is not None and not isinstance(error, SystemExit):
            sys.excepthook = partial(_show, sys.excepthook)


def _show(hook: Hook, kind: type[BaseException], error: BaseException, _: object) -> None:
    """Make `hook` the hook for uncaught exceptions again, and call it as Python would if node.py's
    frame, the first of the traceback of `error`, were not there; set ``sys.last_traceback`` before.
    Raise what the hook raises, from Python 3.11 on without the frame of this function."""
    sys.excepthook = hook
    traceback = error.__traceback__ and error.__traceback__.tb_next
    error.__traceback__ = sys.last_traceback = traceback
    try:
        hook(kind, error, traceback)
    except BaseException as failure:
        failure.__traceback__ = failure.__traceback__ and failure.__traceback__.tb_next
        raise


def is_main_kept() -> bool:
    """Return whether an object that is not frozen refers to the module ``__main__``, as dill's
    modules do, besides ``sys.modules``."""
    referrers = gc.get_referrers(sys.modules["__main__"])
    return any(type(names) is dict and names is not sys.modules for names in referrers)


def wipe_main_first() -> None:
    """Have Python wipe the module ``__main__`` before all others at the exit; for a process where
    `is_main_kept`, since else Python frees it. Python begins at the end of ``sys.modules``. A
    script that imports gzip and then torch has gzip there before multiprocessing's name of
    ``__main__``; a fork has it behind, and would wipe it before it can close the script's files."""
    sys.modules["__mp_main__"] = sys.modules.pop("__mp_main__")


def search_path(script: str) -> list[str]:
    """Return ``sys.path`` as the interpreter would make it for the file `script`: the script's
    folder, then PYTHONPATH, then this process's own ``sys.path`` without the folder of node.py;
    behind the first, each folder once."""
    variable = os.environ.get("PYTHONPATH")
    folders = variable.split(":") if variable else []
    of_variable = map(os.path.abspath, folders)  # '' becomes the working directory, as in Python
    remaining = [path for path in sys.path if path != LIB]
    return [str(Path(script).resolve().parent), *dict.fromkeys([*of_variable, *remaining])]


def _seed_anew() -> None:
    """Seed the global generators of numpy, sympy and torch's CPU, if they are imported, by chance,
    as a new process would; draw the key of multiprocessing anew. Python itself seeds its own
    generator at a fork."""
    multiprocessing.current_process().authkey = os.urandom(32)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
        if hasattr(numpy.random, "set_bit_generator"):  # which keeps its seeds, from 1.24 on
            numpy.random.set_bit_generator(numpy.random.MT19937())
    if sympy := sys.modules.get("sympy.core.random"):  # torch._dynamo imports it
        sympy.rng.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def name_process(command: list[str]) -> None:
    """Have other processes see in ``/proc/<pid>`` `command` as this process's command line, and
    ``os.environ`` as it is now as its environment. Nothing changes where the kernel has no
    PR_SET_MM_MAP (CONFIG_CHECKPOINT_RESTORE)."""
    stat = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    pairs = (f"{name}={value}" for name, value in os.environ.items())
    ends: list[int] = []
    for words in (command, pairs):
        content = b"".join(os.fsencode(word) + b"\0" for word in words)
        buffer = ctypes.create_string_buffer(content, len(content))
        _BUFFERS.append(buffer)
        ends += [ctypes.addressof(buffer), ctypes.addressof(buffer) + len(content)]

    def field(number: int) -> int:
        """Return the field of /proc/self/stat with this number, as man 5 proc counts them."""
        return int(stat[number - FIRST_FIELD])

    sections = [*map(field, CODE), *map(field, DATA), field(BREAK), libc.sbrk(0), field(STACK)]
    # After the places of arguments and environment: no auxv, of size 0, and no file of the program.
    layout = struct.pack("<12QIi", *sections, *ends, 0, 0, -1)
    buffer = ctypes.create_string_buffer(layout, len(layout))
    libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(buffer), ctypes.c_ulong(len(layout)), 0)


_BUFFERS: list[Any] = []  # of `name_process`; the kernel reads them as long as the process lives
