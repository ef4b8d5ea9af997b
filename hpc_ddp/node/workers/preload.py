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
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, AnyStr

from hpc_ddp.core.job.variables import OF_A_RANK
from hpc_ddp.node.workers.script_imports import ScriptImports, UnfitError
from hpc_ddp.node.workers.worker import is_of_mpi_task

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # `is_available` at an import starts no driver
NVML_CALLS = ("_raw_device_count_nvml", "_raw_device_uuid_nvml")  # of torch.cuda
RANK_NAMES = re.compile(
    rf"{OF_A_RANK}|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|(STEP_)?(NUM_TASKS|TASKS_PER_NODE))"
    r"|SLURM_NTASKS_PER_NODE|PMI\w*_RANK|OMPI_COMM_WORLD_\w+"
)
OF_ENVIRON = ("os", "collections.abc", "_collections_abc")  # modules whose code os.environ is
DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband", "/dev/davinci")
ENVIRONMENT = "the environment"  # a part of `_process_state`
# Modules that an optimizer and DDP import when they are first used.
COMPILER = "torch._dynamo"
ALWAYS = ("torch.distributed", COMPILER, "torch.utils.data", "torch.nn.parallel")
THREADS = "/proc/self/task"
ENDING_S = 1.0  # of a thread that has been joined


def import_always(imports: ScriptImports, output: int) -> None:
    """Import the modules of `ALWAYS`, but not torch's compiler for a script that `imports` says may
    change by then what it depends on. Raise as `import_ahead`, which `output` is for."""
    import_ahead([n for n in ALWAYS if n != COMPILER or not imports.delays_compiler], output)


def import_ahead(names: Sequence[str], output: int, *, are_known: bool = True) -> None:
    """Import the modules `names` in this process; a module that does not exist is passed over. The
    imports' output goes to the file descriptor `output`. `are_known` says that the modules are
    torch's own, for which fewer checks are made.

    Raise UnfitError where an import leaves something that a fork does not survive, or that a worker
    would not have from its own import: a changed `_process_state`, an open device, a thread; and
    where an import fails, reads the rank or, unless the modules `are_known`, all variables of the
    environment.
    """
    gc.freeze()  # so `_generators` looks only at new objects
    before = _process_state(are_known)
    with _redirect_output(output), _ask_nvml_alone(), _forbid_rank(are_known):
        for name in names:
            _import_if_there(name)
    if not are_known:
        gc.collect()  # else each worker would end the objects that a package has dropped
    _check_state(before, _process_state(are_known))
    _check_devices_and_threads()


def _check_state(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise UnfitError where the parts of a process, from two calls of `_process_state`, differ."""
    for title, part in after.items():
        if part != before[title]:
            raise UnfitError(f"an import has changed {title}")


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


def _process_state(are_known: bool) -> dict[str, Any]:
    """Return the parts of this process that imports must not change, by a name in words; unless the
    modules `are_known`, also the generators of random numbers and the callbacks at the exit. Equal
    results mean that nothing has changed."""
    state: dict[str, Any] = {
        ENVIRONMENT: {k: v for k, v in os.environ.items() if k != NVML_CHECK},
        "a signal's handler": [signal.getsignal(n) for n in sorted(signal.valid_signals())],
        "the working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "the root logger": list(logging.getLogger().handlers),
        "the open files": _open_files(),
    }
    if not are_known:
        # Forks would share one state of a generator, or a folder that a callback removes.
        state["the generators of random numbers"] = _generators()
        finalizers: Any = weakref.finalize
        state["the callbacks at the exit"] = (atexit._ncallbacks(), len(finalizers._registry))
    return state


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


def _generators() -> list[str]:
    """Return texts by which two calls can be compared: they differ if a global generator of Python,
    numpy or torch's CPU has drawn or was seeded in between, or if a generator object that is not
    frozen (`gc.freeze`) was made or freed."""
    states = [repr(random.getstate())]
    kinds: tuple[type, ...] = (random.Random,)
    if numpy := sys.modules.get("numpy"):
        # The key changes only with each 624th word; `place` is the position in it, and the rest.
        key, *place = numpy.random.get_state()[1:]
        states.append(repr((key.tobytes(), place)))
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    if torch := sys.modules.get("torch"):
        states.append(repr(torch.get_rng_state().numpy().tobytes()))
        # The collector does not track them.
        states.append(repr(_find_in_modules(torch.Generator)))
    # By `type`: some objects answer `isinstance` with a warning.
    instances = sorted(
        id(instance)
        for instance in gc.get_objects()
        if issubclass(type(instance), kinds) and not _draws_anew(instance)
    )
    return [*states, repr(instances)]


def _find_in_modules(kind: type) -> list[int]:
    """Return the ids of all objects of a type that are attributes of modules, or of classes in
    modules other than torch's, in order."""
    ids = set()
    for name, module in list(sys.modules.items()):
        objects = [*vars(module).values()] if type(module) is ModuleType else []
        if not name.startswith("torch."):
            # By `type`: some objects answer `isinstance` with a warning.
            classes = [instance for instance in objects if type(instance) is type]
            own_classes = [vars(cls) for cls in classes if cls.__module__ == name]
            objects += [field for fields in own_classes for field in fields.values()]
        ids |= {id(instance) for instance in objects if type(instance) is kind}
    return sorted(ids)


def _draws_anew(instance: Any) -> bool:
    """Return whether a generator gives each process its own numbers: one of the system, and the one
    of ``tempfile``, which is replaced in a fork."""
    of_tempfile = getattr(vars(tempfile)["_name_sequence"], "_rng", None)
    return instance is of_tempfile or issubclass(type(instance), random.SystemRandom)


def forget_rank() -> None:
    """Remove from this process's environment the ranks and counts that Slurm and MPI gave to the
    one task of the node: an import would take them for those of a worker."""
    for name in list(os.environ):
        if RANK_NAMES.fullmatch(name) or is_of_mpi_task(name):
            del os.environ[name]


class _RankReadError(BaseException):
    """An import has asked for the rank, or for all variables. This is no Exception, which a package
    might catch, and go on."""


@contextlib.contextmanager
def _forbid_rank(are_known: bool) -> Iterator[None]:
    """Inside the block, end an import by `_RankReadError` if it reads a worker's rank, which is not
    set yet, from ``os.environ``, or, unless the modules `are_known`, if it reads all variables. At
    the block's end raise UnfitError if an import was ended so. The class of ``os.environ`` is
    patched for the time of the block."""
    names: list[str] = []
    kind: Any = type(os.environ)
    read, walk = kind.__getitem__, kind.__iter__

    def read_or_end(self: Any, name: AnyStr) -> AnyStr:
        """Return the value of the variable `name`; end the import if `name` is a rank and is not
        set. ``os.environb`` is of the same class, and has bytes."""
        try:
            return read(self, name)  # type: ignore[no-any-return]
        except KeyError:
            if RANK_NAMES.fullmatch(os.fsdecode(name)):
                names.append(os.fsdecode(name))
                raise _RankReadError from None
            raise

    def walk_or_end(self: Any) -> Iterator[str]:
        """Return an iterator over the names of all variables; end the import instead if its module
        is not known, and the caller is no module of Python itself."""
        if not are_known and not _is_called_by_python():
            names.append("all variables")
            raise _RankReadError
        return walk(self)  # type: ignore[no-any-return]

    kind.__getitem__, kind.__iter__ = read_or_end, walk_or_end
    try:
        yield
    finally:
        kind.__getitem__, kind.__iter__ = read, walk
        if names:
            raise UnfitError(f"an import has read {names[0]}")


def _is_called_by_python() -> bool:
    """Return whether a module of Python itself has called `walk_or_end`: it reads all variables to
    start a child process, say."""
    frame = sys._getframe(2)  # 0: this function, 1: `walk_or_end`
    while frame.f_back and frame.f_globals.get("__name__") in OF_ENVIRON:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names


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


def _import_if_there(name: str) -> None:
    """Import the module `name`, if it exists; of ``module:part`` the part as ``from module import
    part`` does, by which a submodule is imported only if the module has no such attribute. Raise
    UnfitError if the import fails otherwise: in the script, where other imports come before, it
    might not fail."""
    module, _, part = name.partition(":")
    name = module if not part else f"{module}.{part}"
    try:
        importlib.import_module(module)
        if part:
            __import__(module, fromlist=(part,))
    except ModuleNotFoundError as error:
        # `name` itself may be missing: it may be a function of its package, and no submodule.
        if not name.startswith(str(error.name)):
            raise UnfitError(f"the import of {name} has failed: {error}") from None
    except BaseException as error:
        raise UnfitError(f"the import of {name} has failed: {error!r}") from None
