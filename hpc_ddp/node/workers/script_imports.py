"""The imports of a script at its start, read from its text: the script is not run for that.

The fork server imports these modules before the script starts. A script is refused where it would
then not get the same modules: it changes its environment or the search path, changes a setting
before an import, or has a module of its own that hides an installed module.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hpc_ddp.core.file_io import parse_python
from hpc_ddp.core.job.variables import OF_A_RANK

MOST_FILES = 500  # of the script's own modules, which are read as well
# Variables that are read when a group, a device or a data loader starts, never at an import.
READ_LATE = re.compile(
    rf"{OF_A_RANK}|CUDA_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|TOKENIZERS_PARALLELISM|(TORCH_)?NCCL_\w+|GLOO_\w+|FI_\w+|UCX_\w+"
)
# Their import starts MPI, which a fork does not survive.
NEVER_AHEAD = ("mpi4py", "horovod", "petsc4py")
OURS = "hpc_ddp"  # in the run's library, which comes before the snapshot of the user's code
# Calls that an import may depend on, of torch and of Python.
SETTINGS = (
    *("set_default_dtype", "set_default_device", "set_default_tensor_type"),
    *("chdir", "setlocale", "filterwarnings", "simplefilter", "basicConfig"),
    *("dictConfig", "fileConfig", "setLoggerClass", "seterr"),
)
SET_NOTHING = ("torch", "torchvision", "numpy", OURS)  # their functions change no later import
WITH_TORCH = {"torch", OURS}
# Names of Python that may change an import, or run any text.
ACTING = (
    *("sys", "importlib", "unittest", "site", "ctypes"),
    *("runpy", "setattr", "exec", "eval", "__import__"),
)
HARMLESS = {"os"}  # what it changes is seen by `_change`
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
STATEMENTS = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)
CHANGES_OF_PATH = ("insert", "remove", "pop", "clear", "sort", "reverse")
INSTALLED = {"site-packages", "dist-packages"}


class UnfitError(Exception):
    """A script can't run in a fork, and has to be started by exec; the text is the reason."""


class OrderError(UnfitError):
    """An import has failed, or has changed a variable that torch reads: in the script, before the
    import of torch, it might not fail, or have an effect on torch."""


class _Import(NamedTuple):
    """An import of the module `name`, or of `parts` from that module, relative by `level` dots (0:
    absolute). `is_certain` says that it always runs; one below an ``if`` may not, say."""

    name: str
    parts: tuple[str, ...]
    level: int
    is_certain: bool


@dataclass
class _Reading:
    """The imports at the top level of one file, and its changes that may matter to an import.

    `steps`, in the order in which they run, are imports, and the lines of statements that may
    change anything: a patch, or a call of a function of the file or of a package that is not read.
    """

    steps: list[_Import | int] = field(default_factory=list)
    last_import: int = 0  # line of the last import, at any level
    changes: list[tuple[int, str]] = field(default_factory=list)  # line, and what is changed there
    settings: list[tuple[int, str]] = field(default_factory=list)  # the same, harmless if late


def imports_of(script: Path, folders: Sequence[Path]) -> list[str]:
    """Return the names of installed modules that `script` and its own modules always import at
    their top level, in the order of the imports, up to the first statement that may change anything
    (see `_Reading`). `folders` have the script's own modules; the first is the script's folder.

    Raise UnfitError where a file can't be read, or changes something on which an import may depend;
    or where a statement that may change anything comes before the import of torch.
    """
    walk = _Walk(script, folders)
    walk.enter(script, is_certain=True)
    return list(walk.names)


@dataclass
class _Walk:
    """Goes through the imports of a script in the order in which they run, and collects the `names`
    of installed modules up to the first statement that may change anything."""

    script: Path
    folders: Sequence[Path]  # with the script's own modules; the first is the script's folder
    names: dict[str, None] = field(default_factory=dict)  # an ordered set
    entered: set[Path] = field(default_factory=set)  # the files that were read
    change: str = ""  # the place of the first statement that may change anything

    def enter(self, path: Path, is_certain: bool) -> None:
        """Read the file `path` and follow its imports; do nothing if the file has been read before,
        or more than `MOST_FILES` have. `is_certain` says that the file's module is always imported.
        Raise UnfitError as `imports_of`."""
        if path in self.entered or len(self.entered) > MOST_FILES:
            return
        self.entered.add(path)
        reading = _read(path)
        # A module of the script runs before later imports of the script: its settings may matter.
        last = reading.last_import if path == self.script else math.inf
        early = [(line, change) for line, change in reading.settings if line < last]
        if changes := [*reading.changes, *early]:
            line, change = changes[0]
            raise UnfitError(f"{path.name}, line {line}, changes {change}")
        for step in reading.steps:
            if isinstance(step, int):
                self.change = self.change or f"{path.name}, line {step}"
            else:
                self._follow(path, step, is_certain and step.is_certain)

    def _follow(self, path: Path, step: _Import, is_certain: bool) -> None:
        """Follow one import, `step`, of the file `path`: `enter` the files of a module that is not
        installed; add an installed module to `names` if its import is certain and no `change` comes
        before. Raise UnfitError where a `change` comes before the first import of torch, and as
        `enter`."""
        name, parts, level, _ = step
        package, top = _package(path, level), name.partition(".")[0]
        base = [package] if package else self.folders[:1] if top == OURS else self.folders
        files = list(_files(name, parts, base))
        if not (files or level or top == OURS or is_installed(name)):
            files = list(_files(name, parts, _folders_elsewhere(name)))
        for file in files:
            self.enter(file, is_certain)
        if files or level or not is_certain or not (top == OURS or is_installed(name)):
            return
        if not self.change:
            self.names[name] = None
            self.names |= dict.fromkeys(f"{name}.{part}" for part in parts if part != "*")
        elif top in WITH_TORCH and not any(n.partition(".")[0] in WITH_TORCH for n in self.names):
            raise UnfitError(f"{self.change}, comes before the import of torch")


def is_installed(name: str) -> bool:
    """Return whether Python would find the module `name` in a folder of installed packages, and it
    may be imported ahead: it is not one of `NEVER_AHEAD`."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in NEVER_AHEAD:
        return False
    try:
        spec = importlib.machinery.PathFinder.find_spec(top)
    except (ImportError, ValueError):
        return False
    return bool(spec and spec.origin and INSTALLED & set(Path(spec.origin).parts))


def find_hiding_file(folders: Sequence[Path], loaded: Collection[str]) -> Path | None:
    """Return the first file or folder in `folders` that Python would import in place of one of the
    `loaded` modules, or of one that it imports at its start; None if there is none. ``hpc_ddp``
    counts only in the first folder, the script's: the run's own comes before the others."""
    tops = {name.partition(".")[0] for name in loaded} - {"__main__"}
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
            if name in tops and (is_module or is_package) and not is_ours:
                return Path(entry.path)
    return None


def _read(path: Path) -> _Reading:
    """Return the reading of the file `path`; raise UnfitError if it can't be read, or is no
    Python."""
    try:
        tree = parse_python(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise UnfitError(f"{path.name} can't be read: {error}") from None
    reading = _Reading()
    _note_steps(tree, reading)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            reading.last_import = max(reading.last_import, node.lineno)
        elif change := _change(node):
            reading.changes.append((node.lineno, change))  # type: ignore[attr-defined]
        elif isinstance(node, ast.Call) and (name := _function_name(node)) in SETTINGS:
            reading.settings.append((node.lineno, f"a setting by {name}"))
        if change := _renaming(node):
            reading.changes.append((node.lineno, change))  # type: ignore[attr-defined]
    return reading


def _note_steps(tree: ast.Module, reading: _Reading) -> None:
    """Append the steps at the top level of a file to those of `reading`."""
    modules: dict[str, str] = {}  # by the names that imports have bound; '' for a function here
    for node, is_certain in _at_top_level(tree.body):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name.split(".")[0]: a.name for a in node.names}
            reading.steps += [_Import(a.name, (), 0, is_certain) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = tuple(alias.name for alias in node.names)
            module = f"{'.' * node.level}{node.module or ''}"
            modules |= {alias.asname or alias.name: module for alias in node.names}
            reading.steps.append(_Import(node.module or "", parts, node.level, is_certain))
        elif isinstance(node, DEFINITIONS):
            modules[node.name] = ""
        elif isinstance(node, STATEMENTS) and _may_change_anything(node, modules):
            reading.steps.append(node.lineno)


def _at_top_level(
    body: Sequence[ast.stmt], is_certain: bool = True
) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield each statement of `body` that may run at an import, also statements inside others, and
    whether it always runs. A statement below ``if``, in a loop, an ``else`` or a handler may not
    run; without `is_certain`, which says that `body` always runs, no statement is certain.

    Left out are the insides of functions, classes and a ``match``, of ``if __name__ …`` with its
    ``else``, and of ``if TYPE_CHECKING``.
    """
    for node in body:
        yield node, is_certain
        if isinstance(node, DEFINITIONS):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _at_top_level(node.orelse, is_certain)
        elif not (isinstance(node, ast.If) and "__name__" in ast.dump(node.test)):
            is_straight = is_certain and isinstance(node, (ast.Try, ast.With))
            for name in ("body", "finalbody"):
                yield from _at_top_level(getattr(node, name, ()), is_straight)
            yield from _at_top_level(getattr(node, "orelse", ()), False)
            for handler in getattr(node, "handlers", ()):
                yield from _at_top_level(handler.body, False)


def _may_change_anything(node: ast.stmt, modules: Mapping[str, str]) -> bool:
    """Return whether the statement `node` may change what a later import finds, in a way that its
    text does not show: it patches a module, or calls a function that may do so. `modules` has the
    names that the file has bound so far, with the module of each; '' for a function or class."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    for target in targets:
        is_part = isinstance(target, (ast.Attribute, ast.Subscript))
        if is_part and _root(target) in modules.keys() - HARMLESS:
            return True
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and (root := _root(call.func)) not in HARMLESS:
            module = modules.get(root)
            top = (module or "").partition(".")[0]
            is_safe = top in SET_NOTHING or (top in sys.stdlib_module_names and top not in ACTING)
            if root in ACTING or (module is not None and not is_safe):
                return True
    return False


def _root(node: ast.AST) -> str:
    """Return the name with which an expression such as ``a.b[0].c()`` begins, '' without one."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _change(node: ast.AST) -> str:
    """Return, in words, the variable that a statement or call changes, ``sys.path`` or
    ``sys.modules``; '' if it changes nothing on which an import may depend."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_name(target.value, "environ"):
                return _variable(target.slice)
            if isinstance(target, ast.Subscript) and _is_name(target.value, "path", "sys"):
                return "sys.path"
            if isinstance(target, ast.Subscript) and _is_name(target.value, "modules", "sys"):
                return "sys.modules"
            if _is_name(target, "environ") or _is_name(target, "path", "sys"):
                return ast.unparse(target)
    if not isinstance(node, ast.Call):
        return ""
    function, name = node.func, _function_name(node)
    if name in ("putenv", "unsetenv", "load_dotenv"):
        return "its environment"
    if not isinstance(function, ast.Attribute):
        return ""
    if _is_name(function.value, "environ") and name in ("setdefault", "pop"):
        return _variable(node.args[0]) if node.args else "its environment"
    if _is_name(function.value, "environ") and name in ("update", "clear", "popitem"):
        return "its environment"
    is_of_path = _is_name(function.value, "path", "sys") and name in CHANGES_OF_PATH
    return "sys.path" if is_of_path else ""


def _function_name(node: ast.Call) -> str:
    """Return the name of a called function, '' if it has none."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _renaming(node: ast.AST) -> str:
    """Return, in words, what a statement gives another name, by which `_change` would not see a
    change: the module ``sys``, a variable of ``sys`` or ``os``, or a setting. '' for any other
    statement."""
    if isinstance(node, ast.Import):
        return "sys" if any(a.name == "sys" and a.asname for a in node.names) else ""
    if isinstance(node, ast.ImportFrom) and any(
        a.asname and a.name in SETTINGS for a in node.names
    ):
        return "the name of a setting"
    if isinstance(node, ast.ImportFrom) and node.module in ("os", "sys"):
        for alias in node.names:
            if (node.module == "sys" and alias.name in ("path", "modules")) or (
                alias.name == "environ" and alias.asname
            ):
                return f"{node.module}.{alias.name}"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
        if _is_name(node.value, "environ"):
            return "os.environ"
        if _is_name(node.value, "path", "sys") or _is_name(node.value, "modules", "sys"):
            return "sys.path"
    return ""


def _folders_elsewhere(name: str) -> list[Path]:
    """Return, in a list, the folder with the top-level module of `name`, a module that is neither
    installed nor the script's own: it is on PYTHONPATH, or of an editable install. [] for a module
    that is not found, is Python's own, one of `NEVER_AHEAD`, or no text (``.py``)."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in NEVER_AHEAD:
        return []
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if not spec or not spec.origin or not spec.origin.endswith(".py"):
        return []
    path = Path(spec.origin)
    return [path.parents[1] if path.name == "__init__.py" else path.parent]


def _is_name(node: ast.AST, name: str, module: str = "") -> bool:
    """Return whether the expression `node` is `name` or ends with ``.name``; with `module`, whether
    it is ``module.name``."""
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "id", "")
        return node.attr == name and (not module or owner == module)
    return not module and isinstance(node, ast.Name) and node.id == name


def _variable(key: ast.AST) -> str:
    """Return the name of the variable for which `key`, a key of ``os.environ``, stands; '' for a
    variable of `READ_LATE`, ``its environment`` where the key is no constant."""
    name = key.value if isinstance(key, ast.Constant) else ""
    if isinstance(name, str) and READ_LATE.fullmatch(name):
        return ""
    return str(name) or "its environment"


def _package(path: Path, level: int) -> Path | None:
    """Return the folder in which a relative import with `level` dots in the file `path` begins;
    None for an absolute import (0), and for one that leads out of all folders."""
    return path.parents[level - 1] if level and level <= len(path.parents) else None


def _files(name: str, parts: Sequence[str], folders: Sequence[Path]) -> Iterator[Path]:
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
