"""Imports of torch ahead of a script's, some of which may have to come first."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from itertools import groupby, takewhile
from traceback import walk_tb
from typing import Any

from hpc_ddp.node.workers.preload import import_ahead
from hpc_ddp.node.workers.script_imports import (
    EndedError,
    OrderError,
    ScriptImports,
    UnfitError,
    is_torch,
)

# Modules that an optimizer and DDP import when they are first used.
COMPILER = "torch._dynamo"
ALWAYS = ("torch.distributed", COMPILER, "torch.utils.data", "torch.nn.parallel")


def import_always(imports: ScriptImports, output: int) -> None:
    """Import the modules of `ALWAYS`, but not torch's compiler, which reads variables at its
    import, for a script that may set some by then. Raise as `import_ahead`, which `output` is
    for."""
    import_ahead([n for n in ALWAYS if n != COMPILER or not imports.sets_variables], output)


def import_up_to_torch(imports: ScriptImports, output: int) -> None:
    """Import packages of a script one by one, up to the first that imports torch, to see whether
    one of them has to come before torch, which this process has imported already; `output` is as in
    `import_ahead`.

    Raise OrderError if so: where an import sets a variable of torch, ends early, or adds a finder
    that takes part in imports of torch; and where none of all packages imports torch. Raise
    UnfitError, at the end, for any other reason of `import_ahead`.
    """
    refusal: UnfitError | None = None
    modules, hooks, finders = set(sys.modules), list(sys.path_hooks), list(sys.meta_path)
    packages = takewhile(lambda name: not is_torch(name), imports.names)
    has_torch = imports.has_torch
    for _, names in groupby(packages, lambda name: re.split("[.:]", name)[0]):
        try:
            import_ahead(list(names), output, are_known=False, may_be_first=True)
        except EndedError as error:
            if not _has_imported_torch(modules, error):
                raise OrderError(f"{error}, before the import of torch") from None
            raise
        except OrderError:
            raise
        except UnfitError as error:  # the next package may still have to come first
            refusal = refusal or error
        if sys.path_hooks != hooks or any(
            _finds_torch(f) for f in sys.meta_path if f not in finders
        ):
            raise OrderError("an import has changed how torch is imported")
        if _has_imported_torch(modules):
            has_torch = True
            break
    if not has_torch:
        raise OrderError(imports.obstacle)
    if refusal:
        raise refusal


def _has_imported_torch(modules: Collection[str], error: BaseException | None = None) -> bool:
    """Return whether a module has imported torch, or a part of it, that was imported after
    `modules`; or one whose import was ended by `error`."""
    parts_of_torch = {id(module) for name, module in sys.modules.items() if is_torch(name)}
    new_modules = [m for n, m in sys.modules.items() if n not in modules and not is_torch(n)]
    scopes = [getattr(module, "__dict__", {}) for module in new_modules]
    while error:
        scopes += [frame.f_globals for frame, _ in walk_tb(error.__traceback__)]
        error = error.__context__
    objects = (part for scope in scopes for part in list(scope.values()))
    return any(id(part) in parts_of_torch for part in objects)


def _finds_torch(finder: Any) -> bool:
    """Return whether a finder of ``sys.meta_path`` would find a module of torch: it may patch it.
    A finder for renamed modules of a package, say, finds none."""
    names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
    paths = [getattr(sys.modules.get(name.rpartition(".")[0]), "__path__", None) for name in names]
    return any(finder.find_spec(*pair) for pair in zip(names, paths, strict=True))
