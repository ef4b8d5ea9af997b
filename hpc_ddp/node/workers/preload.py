"""Imports of torch made once for all workers of a node, and checks that they do no harm there."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from hpc_ddp.core.job.variables import OF_A_RANK
from hpc_ddp.node.workers.first_import import MISSING, READ
from hpc_ddp.node.workers.script_imports import UnfitError
from hpc_ddp.node.workers.worker import is_of_mpi_task

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # `is_available` at an import starts no driver
NVML_CALLS = ("_raw_device_count_nvml", "_raw_device_uuid_nvml")  # of torch.cuda
RANK_NAMES = re.compile(
    rf"{OF_A_RANK}|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|(STEP_)?(NUM_TASKS|TASKS_PER_NODE))"
    r"|SLURM_NTASKS_PER_NODE|PMI\w*_RANK|OMPI_COMM_WORLD_\w+"
)
DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband", "/dev/davinci")
THREADS = "/proc/self/task"
ENDING_S = 1.0  # of a thread that has been joined


def import_all(names: Sequence[str], output: int) -> None:
    """Import the modules of these names; their output goes to the file descriptor `output`.

    Raise UnfitError where an import fails, or leaves something that a fork does not survive, or
    that a worker would not have from its own import, as a plugin of torch may do: a changed
    `_process_state`, an open device, a thread.
    """
    before = _process_state()
    with _redirect_output(output), _ask_nvml_alone():
        for name in names:
            try:
                importlib.import_module(name)
            except BaseException as error:
                raise UnfitError(f"the import of {name} has failed: {error!r}") from None
    if random := sys.modules.get("torch.random"):
        # The compiler puts a function in the place of this one that can't be pickled.
        vars(sys.modules["torch"])["manual_seed"] = vars(random)["manual_seed"]
    for title, part in _process_state().items():
        if part != before[title]:
            raise UnfitError(f"an import has changed {title}")
    _check_devices_and_threads()


def _check_devices_and_threads() -> None:
    """Raise UnfitError where this process has an accelerator's file open, has initialised an
    accelerator, or has a thread besides this one. A child is forked, which ends at once."""
    for file in _open_files().values():
        if file.startswith(DEVICE_FILES):
            raise UnfitError(f"an import has opened {file}")
    if _has_initialised_device():
        raise UnfitError("an import has initialised an accelerator")
    # Thread pools that survive a fork end their threads before it: so fork once, for nothing else.
    if len(os.listdir(THREADS)) > 1:
        if not (pid := os.fork()):
            os._exit(0)
        os.waitpid(pid, 0)
    if (count := _count_threads()) > 1:
        raise UnfitError(f"an import has started {count - 1} threads")


def _count_threads() -> int:
    """Return how many threads this process has. First wait, `ENDING_S` at most, for other threads
    to end: a join returns before the kernel has removed the thread."""
    give_up = time.monotonic() + ENDING_S
    while (count := len(os.listdir(THREADS))) > 1 and time.monotonic() < give_up:
        time.sleep(0.01)
    return count


def _has_initialised_device() -> bool:
    """Return whether torch, if it is imported, has initialised an accelerator in this process."""
    torch: Any = sys.modules.get("torch")
    accelerator = torch and torch.accelerator.current_accelerator()
    return bool(accelerator and torch.get_device_module(accelerator).is_initialized())


@contextlib.contextmanager
def pause_collector() -> Iterator[None]:
    """Switch Python's collector of cycles off inside the block: it would take a fifth of the import
    of torch for nothing. At the block's end freeze all objects (`gc.freeze`), which later
    collections leave out, and set the old thresholds again, unless a package has set its own."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.freeze()
        if not gc.get_threshold()[0]:
            gc.set_threshold(*thresholds)


@contextlib.contextmanager
def keep_cpus() -> Iterator[None]:
    """At the block's end let this thread run on the same CPUs as before the block: with
    OMP_PROC_BIND the import of torch binds it to the first CPU, and workers would inherit that."""
    if not hasattr(os, "sched_setaffinity"):  # no Linux
        yield
        return
    cpus = os.sched_getaffinity(0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Slurm may have given the job other CPUs by now
            os.sched_setaffinity(0, cpus)


@contextlib.contextmanager
def _redirect_output(output: int) -> Iterator[None]:
    """Redirect this process's stdout and stderr to the file descriptor `output` inside the
    block."""
    outputs = [os.dup(number) for number in (1, 2)]
    try:
        with contextlib.suppress(OSError):  # what Python still holds goes to the old stdout
            sys.stdout.flush()
        for number in (1, 2):
            os.dup2(output, number)
        yield
    finally:
        sys.stdout.flush()
        for number, copy in zip((1, 2), outputs, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def _process_state() -> dict[str, Any]:
    """Return the parts of this process that imports must not change, by a name in words. Equal
    results mean that nothing has changed."""
    return {
        "the environment": {k: v for k, v in os.environ.items() if k != NVML_CHECK},
        "a signal's handler": [signal.getsignal(n) for n in sorted(signal.valid_signals())],
        "the working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "the root logger": list(logging.getLogger().handlers),
        "the open files": _open_files(),
    }


def _open_files() -> dict[str, str]:
    """Return the paths of this process's open files by their descriptors, without those in /proc.
    Workers would share the positions in files that an import has opened."""
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith("/proc/"):
                files[number] = target
    return files


def name_of_plugin(environ: Mapping[str, str]) -> str:
    """Return the name of a device's package that torch imports with itself, '' without one: such a
    package may open a device, or a log of the rank."""
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return ""
    return next((plugin.name for plugin in entry_points(group="torch.backends")), "")


@contextlib.contextmanager
def record_lookups() -> Iterator[None]:
    """Inside the block record in `MISSING` the names of modules that imports look for in vain, and
    in `READ` those of variables that are looked up. A copy of the environment reads all of them."""
    finder: Any = _Finder()
    sys.meta_path.append(finder)  # the last finder is asked for what the others do not find
    environ: Any = os.environ
    kind, environ.__class__ = environ.__class__, _Environ
    try:
        yield
    finally:
        environ.__class__ = kind
        sys.meta_path.remove(finder)


class _Finder:
    """The last finder of modules, which finds none."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Record a name."""
        MISSING.add(name)


class _Environ(os._Environ[str]):
    """The environment, whose look-ups of one variable are recorded."""

    def __getitem__(self, name: str) -> str:
        """Record a name; return the variable's text, or raise KeyError."""
        READ.add(name)
        return super().__getitem__(name)

    def items(self) -> ItemsView[str, str]:
        """Return all variables, and record none: tqdm, say, looks through all of them."""
        return {name: os._Environ.__getitem__(self, name) for name in self}.items()


def forget_rank() -> None:
    """Remove from this process's environment the ranks and counts that Slurm and MPI gave to the
    one task of the node: an import would take them for those of a worker."""
    for name in list(os.environ):
        if RANK_NAMES.fullmatch(name) or is_of_mpi_task(name):
            del os.environ[name]


@contextlib.contextmanager
def _ask_nvml_alone() -> Iterator[None]:
    """Inside the block, have ``torch.cuda.is_available()`` ask NVML, and not start the driver,
    which a fork would not survive. Where torch is imported already, also have each of its calls of
    NVML shut NVML down again, which torch itself leaves open."""
    old_setting = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"
    module = vars(sys.modules.get("torch.cuda", object))  # `object` has none of the functions
    originals = {name: module[name] for name in NVML_CALLS if name in module}
    for name, ask in originals.items():
        module[name] = partial(_ask_nvml, ask)
    try:
        yield
    finally:
        for name, ask in originals.items():
            module[name] = ask
        if old_setting is None:
            del os.environ[NVML_CHECK]
        else:
            os.environ[NVML_CHECK] = old_setting


def _ask_nvml(ask: Callable[[], Any]) -> Any:
    """Call `ask`, a function of torch that initialises NVML, then shut NVML down once; return the
    function's answer. NVML counts initialisations, and closes its device files once there are as
    many shutdowns."""
    import ctypes

    try:
        return ask()
    finally:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libnvidia-ml.so.1").nvmlShutdown()
