"""Where Python finds a module: among installed packages, or in files of the script's own."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

OURS = "hpc_ddp"  # in the run's library, which comes before the snapshot of the user's code
INSTALLED = {"site-packages", "dist-packages"}


def own_folders(script: Path) -> list[Path]:
    """Return the folders in which a worker's Python looks for modules first, before those in which
    this process looks: the script's folder, and the snapshot of the user's code."""
    code = os.environ.get("HPC_DDP_CODE")
    folders = [script.resolve().parent, *([Path(code)] if code else [])]
    return list(dict.fromkeys(folders))


def is_installed(name: str) -> bool:
    """Return whether Python would find the top-level package of the module `name` in a folder of
    installed packages; False for a module of Python's own."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return False
    try:
        spec = importlib.machinery.PathFinder.find_spec(top)
    except (ImportError, ValueError):
        return False
    return bool(places := _places(spec)) and all(INSTALLED & set(place.parts) for place in places)


def _places(spec: importlib.machinery.ModuleSpec | None) -> list[Path]:
    """Return the file of the module with this spec; of a package without ``__init__.py`` its
    folders, which may be several; [] for None."""
    if spec and spec.origin:
        return [Path(spec.origin)]
    return [*map(Path, spec.submodule_search_locations or ())] if spec else []


def exists(top: str, folders: Sequence[Path]) -> bool:
    """Return whether Python would find code of the top-level module `top`: in `folders`, with the
    script's own modules, or elsewhere."""
    try:
        spec = importlib.machinery.PathFinder.find_spec(top, [*map(str, folders)])
        spec = spec if spec and spec.origin else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    return spec is not None  # also a folder without an __init__.py


def find_hiding_file(
    folders: Sequence[Path], loaded: Collection[str], missing: Collection[str] = ()
) -> Path | None:
    """Return the first file or folder in `folders` that Python would import in place of one of the
    `loaded` modules, of one that it imports at its start, or of the `missing` ones, which were
    looked for in vain, and for which any folder counts; None if there is none. ``hpc_ddp`` counts
    only in the first folder, the script's: the run's own comes before the others."""
    tops = {name.partition(".")[0] for name in loaded} - {"__main__", *sys.builtin_module_names}
    tops |= {"sitecustomize", "usercustomize"}  # Python imports them at its start
    for folder in folders:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            name, _, suffix = entry.name.partition(".")
            is_module = suffix in ("py", "pyc") or suffix.endswith("so")
            is_package = not suffix and any(Path(entry.path).glob("__init__.*"))
            is_ours = name == OURS and folder != folders[0]
            is_folder = not suffix and name in missing and entry.is_dir()
            is_hiding = name in tops and (is_module or is_package) and not is_ours
            if is_hiding or is_folder or (name in missing and is_module):
                return Path(entry.path)
    return None


def folders_elsewhere(top: str) -> list[Path]:
    """Return the folders with the top-level module `top`, which is neither installed nor the
    script's own: it is on PYTHONPATH, or of an editable install. Only a package without
    ``__init__.py`` may be in several. [] for a module that is not found, is Python's own, or no
    text (``.py``)."""
    if top in sys.stdlib_module_names:
        return []
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    places = [place for place in _places(spec) if place.suffix in (".py", "")]
    return [place.parents[1] if place.name == "__init__.py" else place.parent for place in places]


def package_folder(path: Path, level: int) -> Path | None:
    """Return the folder in which a relative import with `level` dots in the file `path` begins;
    None for an absolute import (0), and for one that leads out of all folders."""
    return path.parents[level - 1] if level and level <= len(path.parents) else None


def files_of_module(name: str, parts: Sequence[str], folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of the module `name` and of its parent packages, the outermost first, then
    those of its submodules that `parts` name; from the first of `folders` that has the module's top
    level. Yield nothing where none has it."""
    words = name.split(".") if name else []
    for folder in folders:
        if words and not ((folder / words[0]).is_dir() or (folder / f"{words[0]}.py").is_file()):
            continue
        path = folder
        for word in words:
            path = path / word
            yield from _files_of(path)
        for part in parts:
            yield from _files_of(path / part)
        return


def _files_of(path: Path) -> Iterator[Path]:
    """Yield the files that exist of the package or module at `path`, a path without ``.py``."""
    for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
        if file.is_file():
            yield file
