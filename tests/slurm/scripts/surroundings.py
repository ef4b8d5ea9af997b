"""Writes what a script sees of its process, as JSON into the folder OUT, a file for each rank."""

from __future__ import annotations

import faulthandler
import gzip
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from typing import Any

import numpy
import sympy.core.random  # type: ignore[import-untyped]
import torch


def text_of(name: str) -> str:
    with open(f"/proc/self/{name}") as file:
        return file.read()


started = time.time() - 60  # of this process, or some seconds before
status = text_of("status").splitlines()
facts = {
    "arguments": [sys.argv, sys.orig_argv[1:]],
    "search path": sys.path,
    "flags": [str(sys.flags), sys.warnoptions, str(sys._xoptions)],
    "main": [sys.modules["__main__"] is sys.modules[__name__], __name__, __file__, repr(__spec__)],
    "names": sorted(name for name in globals() if name.startswith("__")),
    "loader": type(globals()["__loader__"]).__name__,
    "folder": os.getcwd(),
    "open files": sorted(os.listdir("/proc/self/fd")),
    "stdin": os.readlink("/proc/self/fd/0"),
    "stdout": [
        getattr(sys.stdout, "write_through", None),
        sys.stdout.line_buffering,
        sys.stdout.isatty(),
    ],
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "masks": [line for line in status if line.startswith(("SigP", "SigB", "SigI", "SigC"))],
    "command line": text_of("cmdline").split("\0")[1:],
    "environment": sorted(os.environ.items()),
    "seen environment": sorted(text_of("environ").split("\0")),
    "name": text_of("comm"),
    "threads": [len(os.listdir("/proc/self/task")), threading.active_count()],
    "main thread": threading.main_thread().native_id == os.getpid(),
    "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "parent": os.getppid() == int(os.environ["HPC_DDP_AGENT_PID"]),
    "umask": os.umask(0o22),
    "limits": resource.getrlimit(resource.RLIMIT_CORE),
    "processors": sorted(os.sched_getaffinity(0)),
    "hash": hash("a text"),
    "hooks": [sys.excepthook is sys.__excepthook__, faulthandler.is_enabled()],
    "processes": [multiprocessing.current_process().name, multiprocessing.get_start_method()],
    "torch": [torch.get_num_threads(), torch.is_grad_enabled(), str(torch.get_default_dtype())],
}
numbers = [random.random(), float(numpy.random.rand()), torch.rand(1, dtype=torch.float64).item()]
generator: Any = vars(numpy.random)["get_bit_generator"]()
numbers.append(generator.seed_seq.entropy)
numbers.append(sympy.core.random.rng.random())
secret = bytes(multiprocessing.current_process().authkey).hex()
path = os.path.join(os.environ["OUT"], f"{os.environ['RANK']}.json")
if __name__ == "__main__":
    with open(path, "w") as out:
        json.dump({"facts": facts, "random": [*numbers, secret]}, out)


def in_a_child(queue: multiprocessing.SimpleQueue[list[str]]) -> None:
    queue.put([__name__, os.path.basename(sys.argv[0])])


def fail() -> None:
    """End by an error that keeps a file open, whose last words come when Python closes it."""
    record = gzip.open(f"{path}.gz", "wt")  # noqa: SIM115
    record.write("complete")
    raise ValueError("the end")


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        signal.pause()  # until rank 0 has failed
    spawned = multiprocessing.get_context("spawn")
    queue: multiprocessing.SimpleQueue[list[str]] = spawned.SimpleQueue()
    child = spawned.Process(target=in_a_child, args=(queue,))
    child.start()
    print("a child has", *queue.get())
    child.join()
    logging.warning("%s", time.time() - logging.makeLogRecord({}).relativeCreated / 1000 > started)
    hook = sys.excepthook

    def call_hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        print("the hook has", kind.__name__, sys.last_value is error, error.__traceback__ is trace)
        hook(kind, error, trace)  # type: ignore[arg-type]

    sys.excepthook = call_hook
    fail()
