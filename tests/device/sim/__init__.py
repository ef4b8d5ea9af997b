"""A stand-in accelerator in host memory, so that device code runs, and is tested, without a GPU.

``SIM_DEVICES=4 PYTHONPATH=tests/device python …`` gives torch four devices of the type "sim":
torch itself calls `register` when it is imported (see its extensions that load themselves). It is
built once for each version of torch, in one to two minutes, into the cache folder.

Numbers are the CPU's. What a GPU leaves to chance goes wrong each time: see `sim.h`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = (
    "timeline.cpp",
    "memory.cpp",
    "operators.cpp",
    "runtime.cpp",
    "collectives.cpp",
    "module.cpp",
)
NAME = "sim_extension"
UNUSED_S = 7 * 24 * 3600.0


def wanted() -> bool:
    """Tell whether this process is to have stand-in devices."""
    return os.environ.get("SIM_DEVICES", "0") not in ("", "0")


def register() -> None:
    """Make ``torch.device("sim")`` work, where ``SIM_DEVICES`` says how many there are."""
    if wanted():
        from sim import backend

        backend.install()


def extension_path() -> Path:
    """Return where the extension for this torch, Python and source lies, or is to lie."""
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for name in (*SOURCES, "sim.h", "__init__.py"):
        digest.update((HERE / name).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpc-ddp"
    return cache / f"sim-{torch.__version__}-{digest.hexdigest()[:12]}" / f"{NAME}.so"


def build() -> Path:
    """Return the path of the extension, built now unless it was before.

    Raises RuntimeError with the compiler's output where it does not compile.
    """
    path = extension_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path)
            _remove_unused(path.parent.parent)
    path.touch()
    return path


def _remove_unused(cache: Path) -> None:
    """Remove what was built from other sources, and not used for a week."""
    for other in cache.glob("sim-*"):
        newest = max((file.stat().st_mtime for file in other.glob("*")), default=0.0)
        if time.time() - newest > UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)


def _compile(path: Path) -> None:
    import torch
    from torch.utils.cpp_extension import load

    release = tuple(int(number) for number in torch.__version__.split(".")[:2])
    folder = path.parent / "build"
    folder.mkdir(exist_ok=True)
    (folder / "lock").unlink(missing_ok=True)  # torch's own, which a killed process leaves
    load(
        NAME,
        [str(HERE / name) for name in SOURCES],
        extra_cflags=["-O1", "-w", "-std=c++20" if release >= (2, 10) else "-std=c++17"],
        build_directory=str(folder),
        with_cuda=False,
        is_python_module=False,
    )
    (folder / f"{NAME}.so").replace(path)


def load_extension() -> Any:
    path = build()
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
