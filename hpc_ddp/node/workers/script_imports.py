"""Where a script imports torch, read from its text: the script is not run for that.

The fork server has imported torch before the script starts. A script is refused where it would then
not get the same: it does not import torch before anything that may change what torch finds.
Behind that import all is the worker's own. Only torch's compiler, which an optimizer imports when
it is first used, is imported ahead as well, and not for a script that uses it or may do so.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hpc_ddp.core.file_io import parse_python
from hpc_ddp.node.workers.module_files import (
    OURS,
    exists,
    files_of_module,
    folders_elsewhere,
    is_installed,
    package_folder,
)
from hpc_ddp.node.workers.public_packages import HARMLESS_PACKAGES
from hpc_ddp.node.workers.script_changes import (
    DEFINITIONS,
    aliases_of,
    bound_names,
    has_call,
    may_change_anything,
    parts_that_call,
    parts_that_run,
    uses_unread,
)

MOST_FILES = 500  # of the script's own modules, which are read as well
MOST_BYTES = 2_000_000  # of all these files: reading more takes as long as the imports
TRAINING = re.compile(rf"{OURS}[.:]training\b")
# Modules, and parts of modules, that are torch's or import it.
WITH_TORCH = re.compile(
    r"(torch|torchvision|torchaudio|torchmetrics|timm|accelerate|peft|diffusers|evaluate)\b"
    r"|(lightning|pytorch_lightning|lightning_fabric)\b"
    rf"|{OURS}[.:]integrations\b|{TRAINING.pattern}"
    r"|transformers:(?!Data)\w*(Trainer|Model|For[A-Z])"
)
# Words of a script, or of its arguments, that uses torch's compiler or a package that comes with
# it: at its import the compiler notes torch's functions, variables, the working directory and the
# CPUs, and imports parts of torch that bind functions of others, which the script may patch before.
# Also ways to run a text that is not read here, and `sys.path`, on which the compiler's packages
# depend.
COMPILER = "torch._dynamo"
USES_COMPILER = re.compile(
    r"(?<!\bre\.)(?<!\bregex\.)compile|dynamo|inductor|triton|sympy|mpmath|functorch|make_fx"
    r"|\bexport|onnx|flex_attention|while_loop|torch\.cond\b|nested|expanded_weights"
    r"|(?i:fsdp|fully_?shard|dtensor)|_checkpoint\b|checkpoint_wrapper|symbolic_shapes"
    r"|fx\.experimental|graph_transform_observer"
    r"|dist(ributed)?(\.| import (\([^)]*|[^\n(]*)\b)(tensor|nn|_\w+)"
    r"|\bhub\.(load\b|list|help)|\bimportlib(?!\.(metadata|resources))"
    r"|\b(imp|pydoc|pkgutil|runpy|entry_points|__import__)\b|\bexec\(|\bsys\.path\b"
)
SETS_FROM_FILES = "hydra"  # a package that reads YAML files, which are not read here
NEVER_TRUE = re.compile(r"(\w+\.)?TYPE_CHECKING")
GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")


class UnfitError(Exception):
    """A script can't run in a fork, and has to be started by exec; the text is the reason."""


class _Import(NamedTuple):
    """An import, in a `line`, of the module `name`, or of `parts` from that module, relative by
    `level` dots (0: absolute). `is_certain` says that it always runs, which one below an ``if``
    may not; `is_tried` that it stands in a ``try``, and may fail."""

    name: str
    parts: tuple[str, ...]
    level: int
    line: int
    is_certain: bool
    is_tried: bool


@dataclass
class _Reading:
    """The imports of one file.

    `steps`, in the order in which they run at the top level, are imports, and the lines of
    statements that may change what a later import finds. `late_imports` are in functions, say.
    """

    steps: list[_Import | int] = field(default_factory=list)
    late_imports: list[_Import] = field(default_factory=list)
    uses_compiler: bool = False


def modules_ahead(
    script: Path, folders: Sequence[Path], arguments: Sequence[str] = ()
) -> list[str]:
    """Return the modules that can be imported ahead for `script`, started with `arguments`, beside
    torch: its compiler, unless the script may use it, and ``hpc_ddp.training``, if the script
    imports it. `folders` have the script's own modules, which are read as well; the first is the
    script's folder.

    Raise UnfitError where a file can't be read, and where no import of torch comes before a
    statement that may change what it finds.
    """
    walk = _Walk(script, folders)
    walk.enter(script, is_certain=True)
    for path, step in walk.late_imports:  # which grows meanwhile
        walk.follow_late(path, step)
    if not walk.has_torch and walk.change:
        raise UnfitError(f"{walk.change}, comes before the import of torch")
    if not walk.has_torch:
        raise UnfitError("no import of torch is seen at the top level of the script")
    uses_compiler = walk.uses_compiler or any(map(USES_COMPILER.search, arguments))
    return [COMPILER] * (not uses_compiler) + [f"{OURS}.training"] * walk.uses_training


@dataclass
class _Walk:
    """Goes through the imports of a script in the order in which they run, up to the first that
    imports torch or the first statement that may change anything; later through its `late_imports`,
    only to read the script's own modules."""

    script: Path
    folders: Sequence[Path]  # with the script's own modules; the first is the script's folder
    has_torch: bool = False  # torch is imported for certain, and before any `change`
    uses_training: bool = False  # ``hpc_ddp.training`` is, too
    entered: set[Path] = field(default_factory=set)  # the files that were read
    change: str = ""  # the place of the first statement that may change anything
    late_imports: list[tuple[Path, _Import]] = field(default_factory=list)  # with their files
    uses_compiler: bool = False
    bytes: int = 0  # of the files that were read

    def enter(self, path: Path, is_certain: bool) -> None:
        """Read the file `path` and follow its imports; do nothing if the file has been read before.
        `is_certain` says that the file's module is always imported. Raise UnfitError as
        `modules_ahead`."""
        for step in self._read_once(path).steps:
            if isinstance(step, int):
                self._note_change(path, step)
            else:
                self._follow(path, step, is_certain and step.is_certain)

    def follow_late(self, path: Path, step: _Import) -> None:
        """Read the files of the script's own module that the file `path` imports by `step` after
        all imports at the top level. Raise UnfitError as `_read_once`."""
        for file in self._find_files_of_module(path, step):
            reading = self._read_once(file)
            steps = [step for step in reading.steps if isinstance(step, _Import)]
            self.late_imports += [(file, step) for step in steps]

    def _read_once(self, path: Path) -> _Reading:
        """Return the reading of the file `path`, and note its late imports; return an empty one if
        the file has been read before. Raise UnfitError where it can't be read, or where there are
        more files than `MOST_FILES` or more text than `MOST_BYTES`."""
        if path in self.entered:
            return _Reading()
        if len(self.entered) > MOST_FILES:
            raise UnfitError(f"it has more than {MOST_FILES} modules of its own")
        self.bytes += path.stat().st_size if path.exists() else 0
        if self.bytes > MOST_BYTES:
            raise UnfitError(f"its own modules have more than {MOST_BYTES / 1e6:.0f} MB")
        self.entered.add(path)
        reading = _read(path, is_script=path == self.script)
        self.uses_compiler |= reading.uses_compiler
        self.late_imports += [(path, step) for step in reading.late_imports]
        return reading

    def _find_files_of_module(self, path: Path, step: _Import) -> list[Path]:
        """Return the files of the script's own module, and of its parent packages, that the file
        `path` imports by `step`; [] for a module that is installed or Python's own. A package that
        is not known, or reads files that are not read here, sets
        `uses_compiler`."""
        name, parts, level, *_ = step
        package, top = package_folder(path, level), name.partition(".")[0]
        base = [package] if package else self.folders[:1] if top == OURS else self.folders
        files = list(files_of_module(name, parts, base))
        if not (files or level or top == OURS or is_installed(name)):
            files = [
                f
                for folder in folders_elsewhere(top)
                for f in files_of_module(name, parts, [folder])
            ]
        if not (files or level or top in sys.stdlib_module_names):
            may_use_it = top == SETS_FROM_FILES or not self._is_known(name)
            # A module that is not found is on a path that the script sets, or made by it.
            self.uses_compiler |= may_use_it and (not step.is_tried or exists(top, self.folders))
        return files

    def _is_known(self, name: str) -> bool:
        """Return whether an installed module is hpc-ddp's, or of `HARMLESS_PACKAGES`."""
        top = name.partition(".")[0]
        return top == OURS or (top in HARMLESS_PACKAGES and is_installed(name))

    def _follow(self, path: Path, step: _Import, is_certain: bool) -> None:
        """Follow one import, `step`, at the top level of the file `path`: `enter` the files of a
        module that is not installed; note an import of torch that `is_certain`. An import of a
        package that is not known (`HARMLESS_PACKAGES`) counts as a change, as does that of a module
        called like one that is known, or one of Python. Raise UnfitError as `enter`."""
        files = self._find_files_of_module(path, step)
        for file in files:
            self.enter(file, is_certain)
        name, parts, level, *_ = step
        top = name.partition(".")[0]
        if files and not level and (top in sys.stdlib_module_names or top in HARMLESS_PACKAGES):
            self._note_change(path, step.line)  # its functions would be taken for harmless ones
        if files or level or top in sys.stdlib_module_names:
            return
        is_known = self._is_known(name)
        if not is_known and exists(top, self.folders):
            self._note_change(path, step.line)
        if is_known and is_certain and not self.change:
            names = [name, *(f"{name}:{part}" for part in parts)]
            self.has_torch |= any(map(WITH_TORCH.match, names))
            self.uses_training |= any(map(TRAINING.match, names))

    def _note_change(self, path: Path, line: int) -> None:
        """Note a statement that may change anything, unless one comes before it."""
        self.change = self.change or f"{path.name}, line {line}"


def _read(path: Path, is_script: bool) -> _Reading:
    """Return the reading of the file `path`, which is the script itself or one of its modules;
    raise UnfitError if it can't be read, or is no Python."""
    try:
        text = path.read_bytes()
        tree = parse_python(path, text)
    except (OSError, SyntaxError, ValueError) as error:
        raise UnfitError(f"{path.name} can't be read: {error}") from None
    reading = _Reading(
        uses_compiler=USES_COMPILER.search(text.decode(errors="replace")) is not None
    )
    tried = _statements_in_try(tree)
    early = _note_steps(tree, is_script, reading, tried)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in early:
            reading.late_imports += _split(node, False, node in tried)
    return reading


def _note_steps(
    tree: ast.Module, is_script: bool, reading: _Reading, tried: Set[ast.AST]
) -> set[ast.stmt]:
    """Append the steps at the top level of a file to those of `reading`; return the statements.
    `tried` has the nodes in a ``try`` (`_statements_in_try`)."""
    modules: dict[str, str] = {}  # by the names that imports have bound; '' for a function here
    statements: set[ast.stmt] = set()
    for node, is_certain in _at_top_level(tree.body, is_script):
        statements.add(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules |= bound_names(node)
            reading.steps += _split(node, is_certain, node in tried)
        elif any(may_change_anything(part, modules) for part in parts_that_run(node)) or any(
            uses_unread(part, modules) for part in parts_that_call(node)
        ):
            reading.steps.append(node.lineno)
        modules |= aliases_of(node, modules)
        if isinstance(node, DEFINITIONS):
            modules[node.name] = ""
    return statements


def _statements_in_try(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes in the bodies of ``try`` statements of a file."""
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    return {inner for node in tries for part in node.body for inner in ast.walk(part)}


def _split(node: ast.Import | ast.ImportFrom, is_certain: bool, is_tried: bool) -> list[_Import]:
    """Return the imports of a statement."""
    place = node.lineno, is_certain, is_tried
    if isinstance(node, ast.Import):
        return [_Import(alias.name, (), 0, *place) for alias in node.names]
    parts = tuple(alias.name for alias in node.names)
    return [_Import(node.module or "", parts, node.level, *place)]


def _at_top_level(
    body: Sequence[ast.stmt], is_script: bool, is_certain: bool = True
) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield each statement of `body` that may run at an import, also statements inside others, and
    whether it always runs. A statement below ``if``, in a loop, an ``else``, a handler or a
    ``match`` may not run; without `is_certain`, which says that `body` always runs, no statement is
    certain.

    Left out are the insides of functions and classes, and of ``if TYPE_CHECKING``.
    The body of ``if __name__ == "__main__"`` always runs in the script itself, with `is_script`,
    and never in another file.
    """
    for node in body:
        yield node, is_certain
        if isinstance(node, ast.ClassDef):
            yield from _at_top_level(node.body, is_script, is_certain)
        if isinstance(node, DEFINITIONS):
            continue
        if isinstance(node, ast.If) and NEVER_TRUE.fullmatch(ast.unparse(node.test)):
            yield from _at_top_level(node.orelse, is_script, is_certain)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in GUARDS:
            yield from _at_top_level(node.body if is_script else node.orelse, is_script, is_certain)
        else:
            # A `with` may silence the output of an import, or change something for a while.
            is_plain = isinstance(node, ast.With) and not any(map(has_call, node.items))
            is_straight = is_certain and (is_plain or isinstance(node, ast.Try))
            body = getattr(node, "body", [])
            # Where something fails in a `try`, its handler comes, and nothing of what is left.
            length = 1 if getattr(node, "handlers", ()) else len(body)
            yield from _at_top_level(body[:length], is_script, is_straight)
            yield from _at_top_level(body[length:], is_script, False)
            yield from _at_top_level(getattr(node, "finalbody", ()), is_script, is_straight)
            yield from _at_top_level(getattr(node, "orelse", ()), is_script, False)
            for branch in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from _at_top_level(branch.body, is_script, False)
