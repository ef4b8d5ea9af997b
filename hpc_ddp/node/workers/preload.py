"""Imports made once for all workers of a node, and the checks that they do no harm there."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from hpc_ddp.core.job.variables import OF_A_RANK
from hpc_ddp.node.workers.script_imports import UnfitError
from hpc_ddp.node.workers.worker import is_of_mpi_task

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # `is_available` at an import starts no driver
NVML_CALLS = ("_raw_device_count_nvml", "_raw_device_uuid_nvml")  # of torch.cuda
RANK_NAMES = re.compile(
    rf"{OF_A_RANK}|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|(STEP_)?(NUM_TASKS|TASKS_PER_NODE))"
    r"|SLURM_NTASKS_PER_NODE|PMI\w*_RANK|OMPI_COMM_WORLD_\w+"
)
OF_ENVIRON = ("os", "collections.abc", "_collections_abc")  # modules whose code os.environ is
DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband", "/dev/davinci")


def import_ahead(names: Sequence[str], output: int, *, are_known: bool = True) -> None:
    """Import modules, whose prints go to the descriptor `output`; of those that are not known the
    generators of random numbers and the callbacks at the exit count as well.

    Raise UnfitError where one fails, or leaves something that a fork does not survive, or that a
    worker would not have from its own import.
    """
    gc.freeze()  # `_generators` then looks at new objects alone
    before = _state(are_known)
    with _captured(output), _without_driver(), _rank_unread(are_known):
        for name in names:
            _import_if_there(name)
    if not are_known:
        gc.collect()  # what a package has dropped is not to end once in each worker
    for title, value in _state(are_known).items():
        if value != before[title]:
            raise UnfitError(f"an import has changed {title}")
    for file in _open_files().values():
        if file.startswith(DEVICE_FILES):
            raise UnfitError(f"an import has opened {file}")
    from hpc_ddp.node.workers.device_check import has_initialised_device

    if has_initialised_device():
        raise UnfitError("an import has initialised an accelerator")
    if not (pid := os.fork()):  # thread pools that survive a fork end their threads before one
        os._exit(0)
    os.waitpid(pid, 0)
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        raise UnfitError(f"an import has started {count - 1} threads")


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Import without Python's collector of cycles, which takes a fifth of the import of torch: it
    looks at all that is there again and again, and hardly any of it can go. It does not look later
    either at what is imported in here. Where a package turns it off, or chooses thresholds of its
    own, that stays."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.freeze()
        if not gc.get_threshold()[0]:
            gc.set_threshold(*thresholds)


@contextlib.contextmanager
def _captured(output: int) -> Iterator[None]:
    """Redirect stdout and stderr to a descriptor."""
    outputs = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(output, number)
        yield
    finally:
        sys.stdout.flush()
        for number, copy in zip((1, 2), outputs, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def _state(are_known: bool) -> dict[str, Any]:
    """Return what an import must not change, by its name."""
    state: dict[str, Any] = {
        "a signal's handler": [signal.getsignal(n) for n in sorted(signal.valid_signals())],
        "the working directory": os.getcwd(),
        "the environment": {k: v for k, v in os.environ.items() if k != NVML_CHECK},
        "sys.path": list(sys.path),
        "the root logger": list(logging.getLogger().handlers),
        "the open files": _open_files(),
    }
    if not are_known:
        # A fork would give all ranks one generator, or one folder that the first to end removes.
        state["the generators of random numbers"] = _generators()
        state["the callbacks at the exit"] = atexit._ncallbacks()
    return state


def _open_files() -> dict[str, str]:
    """Return the open files of this process by their descriptors: workers would share positions."""
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith("/proc/"):
                files[number] = target
    return files


def _generators() -> list[str]:
    """Return the states of the global generators of Python, numpy and torch, and all others that
    are not frozen."""
    states = [repr(random.getstate())]
    kinds: tuple[type, ...] = (random.Random,)
    if numpy := sys.modules.get("numpy"):
        states.append(repr(numpy.random.get_state()[1].tobytes()))
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    if torch := sys.modules.get("torch"):
        states.append(repr(torch.get_rng_state().numpy().tobytes()))
        kinds += (torch.Generator,)
    # By their types: some answer `isinstance` with a warning.
    instances = sorted(
        id(instance) for instance in gc.get_objects() if issubclass(type(instance), kinds)
    )
    return [*states, repr(instances)]


def forget_rank() -> None:
    """Remove from this process's environment the ranks that Slurm and MPI gave to the one task of
    the node: an import would take them for the worker's."""
    for name in list(os.environ):
        if RANK_NAMES.fullmatch(name) or is_of_mpi_task(name):
            del os.environ[name]


class _RankReadError(BaseException):
    """An import asks for the rank; no package is to catch it, and wait for its peers, say."""


@contextlib.contextmanager
def _rank_unread(are_known: bool) -> Iterator[None]:
    """Raise UnfitError at the end if something has asked the environment for a worker's rank, which
    is not there yet, or, unless the imports are known, has read all variables. The import ends
    there."""
    names: list[str] = []
    kind: Any = type(os.environ)
    read, walk = kind.__getitem__, kind.__iter__

    def note(self: Any, name: str) -> str:
        try:
            return str(read(self, name))
        except KeyError:
            if RANK_NAMES.fullmatch(name):
                names.append(name)
                raise _RankReadError from None
            raise

    def note_all(self: Any) -> Iterator[str]:
        if not are_known and not _is_called_by_python():
            names.append("all variables")
            raise _RankReadError
        return walk(self)  # type: ignore[no-any-return]

    kind.__getitem__, kind.__iter__ = note, note_all
    try:
        yield
    finally:
        kind.__getitem__, kind.__iter__ = read, walk
        if names:
            raise UnfitError(f"an import has read {names[0]}")


def _is_called_by_python() -> bool:
    """Return whether a module of Python itself iterates over the environment, as for a child."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__") in OF_ENVIRON:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names


@contextlib.contextmanager
def _without_driver() -> Iterator[None]:
    """Have ``torch.cuda.is_available()`` start no driver, which a fork would not survive, and where
    torch is imported by now leave NVML, which it asks instead, as it was: torch leaves it open."""
    before = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"
    module = vars(sys.modules.get("torch.cuda", object))
    originals = {name: module[name] for name in NVML_CALLS if name in module}
    for name, ask in originals.items():
        module[name] = partial(_ask_nvml, ask)
    try:
        yield
    finally:
        for name, ask in originals.items():
            module[name] = ask
        if before is None:
            del os.environ[NVML_CHECK]
        else:
            os.environ[NVML_CHECK] = before


def _ask_nvml(ask: Callable[[], Any]) -> Any:
    """Return the answer of a function of torch that initialises NVML, and end that: NVML counts how
    often it was, and closes its device files for the last one."""
    import ctypes

    try:
        return ask()
    finally:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libnvidia-ml.so.1").nvmlShutdown()


def _import_if_there(name: str) -> None:
    """Import a module, unless there is none; raise UnfitError if it fails: the script may rely on
    that."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):  # no submodule, but a function, say
            raise UnfitError(f"the import of {name} has failed: {error}") from None
    except BaseException as error:
        raise UnfitError(f"the import of {name} has failed: {error!r}") from None
