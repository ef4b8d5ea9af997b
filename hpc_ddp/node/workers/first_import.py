"""The first import of torch by a script that runs in a fork, whose process has torch already.

The lines before that import are read before the fork (`script_imports`). This module looks at what
they have really changed: by a function, say, that the reader takes for a harmless one.
"""

from __future__ import annotations

import atexit
import importlib.abc
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from hpc_ddp.node.workers.script_changes import READ_AT_IMPORT, READ_LATE
from hpc_ddp.node.workers.worker import NOTICE_SIGNALS, heed_notice

HIDDEN = re.compile(r"(torch|hpc_ddp\.training)(\.|$)")
# Variables among `READ_AT_IMPORT` that packages set at their import (joblib, scikit-learn, OpenCV,
# Lightning), and hpc-ddp, and on which torch's import does not depend.
SET_BY_PACKAGES = re.compile(
    r"KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)|LD_LIBRARY_PATH|PYTORCH_NVML_BASED_CUDA_CHECK|HPC_DDP_\w+"
)
MISSING: set[str] = set()  # names of modules that imports have looked for in vain
READ: set[str] = set()  # names of variables that imports have looked up


def is_read(name: str) -> bool:
    """Return whether the import of torch may depend on a variable of the environment."""
    if READ_LATE.fullmatch(name) or SET_BY_PACKAGES.fullmatch(name):
        return False
    return name in READ or bool(READ_AT_IMPORT.fullmatch(name))


class FirstImport(importlib.abc.Loader):
    """A finder and loader of torch and of what uses it, which are hidden from ``sys.modules`` up to
    the first import of one of them. It then puts all of them back; where a variable that the import
    reads, the working directory, the CPUs or ``sys.path`` are not those of the script's start, or
    where one of the `MISSING` modules is there now, the process becomes `command` anew, by exec, as
    it was at its start."""

    def __init__(self, command: Sequence[str]) -> None:
        """Hide torch, in the process that is about to run the script of `command` (python, its
        options, the script and its arguments)."""
        self.command, self.process = list(command), os.getpid()
        self.hidden = {name: sys.modules.pop(name) for name in filter(HIDDEN.match, [*sys.modules])}
        # `from hpc_ddp import training` would take the attribute, and import nothing.
        vars(sys.modules["hpc_ddp"]).pop("training", None)
        self.specs = {name: module.__spec__ for name, module in self.hidden.items()}
        self.folder, self.environ = _working_folder(), dict(os.environ)
        self.path, self.cpus = list(sys.path), os.sched_getaffinity(0)
        self.asked = ""  # the first hidden module that is imported
        self.finder: Any = self
        sys.meta_path.insert(0, self.finder)
        # Called before the functions that torch has registered, which may import parts of it.
        atexit.register(self.put_back)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return how a hidden module is loaded; None for any other module."""
        if not (original := self.specs.get(name)):
            return None
        spec = ModuleSpec(name, self, origin=original.origin)
        spec.submodule_search_locations = original.submodule_search_locations
        spec.has_location = original.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a hidden module, where nothing has changed that torch's import depends on. A
        process that the script has forked gets it in any case."""
        self.put_back()
        if os.getpid() == self.process and (change := self._find_change()):
            self._start_again(change)
        self.asked = spec.name
        return self.hidden[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as its real import has made it."""
        module.__spec__ = self.specs[self.asked]

    def put_back(self) -> None:
        """Put the hidden modules back, once."""
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
            sys.modules.update(self.hidden)
            if training := self.hidden.get("hpc_ddp.training"):
                vars(sys.modules["hpc_ddp"])["training"] = training
            atexit.unregister(self.put_back)

    def _find_change(self) -> str:
        """Return, in words, what has changed since the start of the script; '' if nothing has."""
        for name in sorted({*self.environ, *os.environ}):
            if self.environ.get(name) != os.environ.get(name) and is_read(name):
                return name
        if _working_folder() != self.folder:
            return "the working directory"
        if sys.path != self.path:
            return "sys.path"
        if os.sched_getaffinity(0) != self.cpus:
            return "the number of CPUs"
        tops = sorted({name for name in MISSING if "." not in name} - {*sys.modules})
        return next((f"the module {top}" for top in tops if PathFinder.find_spec(top)), "")

    def _start_again(self, change: str) -> None:
        """Replace this process by the script's own, by exec, with the environment, folder, CPUs and
        log that it had at its start; say so there. After a notice end by it, as a start does."""
        for number in NOTICE_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        heed_notice()
        with suppress(KeyError, OSError):  # the script may have put other files in the log's place
            name = f"rank-{self.environ['RANK']}.log"
            path = os.path.join(self.environ["HPC_DDP_NODE_FOLDER"], name)
            log = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
        text = f"{change} has changed before the import of torch: the script starts again, by exec"
        os.write(2, f"hpc-ddp: {text}\n".encode())
        with suppress(OSError):  # they may be gone
            os.chdir(self.folder)
        with suppress(OSError):
            os.sched_setaffinity(0, self.cpus)
        os.execve(sys.executable, [sys.executable, *self.command[1:]], self.environ)


def _working_folder() -> str:
    """Return the path of the working directory, '' where it has been removed."""
    with suppress(FileNotFoundError):
        return os.getcwd()
    return ""
