"""The snapshot of the user's code."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from filecmp import cmp
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

from hpc_ddp.core.console.progress import ProgressBar
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import drafted_folder, parse_python, read_json, write_json
from hpc_ddp.core.file_owners import user_name
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.run_files import git_tree

LIMIT_BYTES = 50 * 10**6
LIMIT_FILES = 20_000
# What trainings write; left out where it is large, and the rest is not.
WEIGHTS = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".npz", ".npy", ".h5", ".onnx")
LARGE_BYTES = 10**6


def next_place(script: Path, run: RunFolder) -> tuple[Path, Path]:
    """Return the path of the run's next snapshot, and the path of `script`, an absolute one, in it.
    The snapshot is ``code/<n>`` in the run's folder, numbered from 0. Nothing is made; git is asked
    for the script's work tree."""
    newest = run.newest_code
    target = run.code / (str(int(newest.name) + 1) if newest else "0")
    return target, target / script.relative_to(git_tree.find_work_tree(script) or script.parent)


def take_snapshot(script: Path, run: RunFolder, exclude: Sequence[str]) -> None:
    """Copy the code around `script` to the run's `next_place`, and write the note of the script's
    path in the copy. A bar on stderr shows the progress.

    The files are those of `select_files`, which has the same arguments, and in any case the script.
    Links are copied as links, and lead where they led. Notes on stderr name what is left out, also
    modules that the script's own files import.

    Raises
    ------
    UsageError
        the code is larger than 50 MB or 20,000 files, or git can't list it; nothing is copied then
    OSError
        a file can't be read or written; no copy is left then
    """
    root, names = select_files(script, run, exclude)
    target, copy_of_script = next_place(script, run)
    inside = copy_of_script.relative_to(target)
    with drafted_folder(target) as draft:
        _copy_all(root, names, draft)
        _copy_script(script, draft / inside)
        note_script(target, script, inside)  # before the end of the block, which renames the draft
    for name in _uncopied_modules(script, root, set(names)):
        say(
            f"note: the copy of the code leaves out {name}, which the script imports (a file that"
            " git ignores?); git add -f adds it, --no-snapshot runs the live code"
        )


def _copy_all(root: Path, names: Sequence[str], target: Path) -> None:
    """Copy files of the code in `root`, by names relative to it, into `target`."""
    folders: set[Path] = set()
    with ProgressBar("copying the code", len(names)) as progress:
        for name in names:
            copy = target / name
            if copy.parent not in folders:
                copy.parent.mkdir(parents=True, exist_ok=True)
                folders.add(copy.parent)
            _copy_file(root / name, copy, root)
            progress.add(1)


def _copy_script(script: Path, copy: Path) -> None:
    """Copy the script to `copy` unless that exists: git may ignore the script, or the user exclude
    it. A script without a file (of a module) is passed over."""
    if script.is_file() and not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script, copy)


def _copy_file(path: Path, copy: Path, root: Path) -> None:
    """Copy a file or link of the code in `root`. A link that leads out of `root` becomes absolute,
    so that it leads where it led."""
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root.resolve()):
        copy.symlink_to(path.parent.resolve() / path.readlink())
    else:
        shutil.copy(path, copy, follow_symlinks=False)


def _uncopied_modules(script: Path, root: Path, copied: Set[str]) -> list[str]:
    """Return the files, relative to `root`, of those modules that are not among `copied` (names
    relative to `root`) and that `script`, or a copied module that it needs, imports. A file that
    can't be parsed is passed over."""
    names: list[str] = []
    looked_at, paths = {str(script)}, [str(script)]
    folders = [*dict.fromkeys((str(script.parent), str(root)))]
    files_at = functools.cache(_files_at)
    while paths:
        path = paths.pop()
        try:
            modules = _modules_of(parse_python(Path(path), Path(path).read_bytes()), path, folders)
        except (OSError, SyntaxError, ValueError):
            continue
        parts = ((place, part) for name, place in modules for part in _parts_of(name))
        files = dict.fromkeys(file for place, part in parts for file in files_at(f"{place}/{part}"))
        for file in [file for file in files if file not in looked_at]:
            looked_at.add(file)
            name = os.path.relpath(file, root)
            # A file below a linked folder is not among the names, but the link is.
            if copied.isdisjoint([name, *map(str, Path(name).parents)]):
                names.append(name)
            else:
                paths.append(file)
    return names


def _modules_of(tree: ast.AST, path: str, folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, folder) of the modules that the parsed file at `path` imports: the name with
    dots, and each of the `folders` to search; for a relative import the package of `path`."""
    for statement in _statements_below(tree):
        if isinstance(statement, ast.Import):
            names, places = [alias.name for alias in statement.names], folders
        elif isinstance(statement, ast.ImportFrom):
            start = f"{statement.module}." if statement.module else ""
            names = [f"{start}{alias.name}" for alias in statement.names]
            level = statement.level
            places = [str(p) for p in Path(path).parents[level - 1 : level]] if level else folders
        else:
            continue
        yield from itertools.product(names, places)


def _statements_below(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module, at any depth. `ast.walk` would visit all expressions, too,
    which takes most of the time of a submit."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(node, field, None)
            if isinstance(children, list):  # an expression has one node there
                yield from (child for child in children if isinstance(child, ast.stmt))
                pending += children


def _parts_of(name: str) -> Iterator[str]:
    """Yield the paths of a module's packages and of the module: of ``a.b`` "a" and "a/b"."""
    return itertools.accumulate(name.split("."), "{}/{}".format)


def _files_at(path: str) -> list[str]:
    """Return the files of the module at a path without ending: those that are there."""
    return [*filter(os.path.isfile, (f"{path}/__init__.py", f"{path}.py"))]


def select_files(script: Path, run: RunFolder, exclude: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the top folder of the script's code, and the names, relative to it, of the files that
    a snapshot copies. The folder is the script's git work tree (files that git does not ignore,
    with submodules), else the script's own folder (no hidden folders, caches, environments).

    A note on stderr names what is left out of these: git repositories that are no submodules; files
    of users other than this user, root and the script's owner; and all large weights if they do not
    fit together. Files that match a pattern of `exclude` (of `fnmatch`: for names relative to the
    folder, or absolute paths without links) are left out without a note, and so are the folder of
    all runs, in which `run` lies, and any folder of a run.

    Raises
    ------
    UsageError
        the files have more than 50 MB, or are more than 20,000 (the message names the largest); or
        git can't list them
    OSError
        a file can't be looked at
    """
    tree, owners = git_tree.find_work_tree(script), git_tree.trusted_owners(script)
    root = tree or script.parent
    names = (
        git_tree.list_files(root, run.root, owners) if tree else _list_plain_files(root, run.root)
    )
    names = _without_runs(root, names)
    return root, list(_select_within_limits(root, names, exclude, owners))


def is_newest_of(run: RunFolder, script: Path) -> bool:
    """Return whether the newest snapshot of a run, if there is one, was taken for `script`, an
    absolute path, by the snapshot's note."""
    newest_code = run.newest_code
    note = read_json(_note_of_script(newest_code)) if newest_code else {}
    return note.get("script") == str(script)


def find_newest(run: RunFolder, script: Path, is_module: bool = False) -> tuple[Path, Path]:
    """Return the newest snapshot of a run (of a task without one: of its array), and the relative
    path in it of `script`, an absolute path. The path is the one that the snapshot's note has for
    this script, else that in the script's work tree. Unless `is_module`, a file has to be there;
    else the longest end of the script's path that is a file of the snapshot is returned.

    Raises
    ------
    UsageError
        there is no snapshot, or no such script in it
    """
    newest_code = run.newest_code
    note = read_json(_note_of_script(newest_code)) if newest_code else {}
    # The note comes first: the work tree may have another name by now, or no .git.
    if note.get("script") == str(script) and "inside" in note:
        likely = Path(note["inside"])
    else:
        likely = script.relative_to(git_tree.find_work_tree(script) or script.parent)
    if newest_code and is_module:
        return newest_code, likely
    # The script may lie in another work tree by now.
    ends = [likely, *(Path(*script.parts[start:]) for start in range(1, len(script.parts)))]
    inside = next((end for end in ends if newest_code and (newest_code / end).is_file()), None)
    if newest_code is None or inside is None:
        raise UsageError(
            f"run {run.path} has no snapshot of {script}",
            hint="take the code as it is now: without --same-code, or with --new-code",
        )
    return newest_code, inside


def find_changed_files(code: Path, inside: Path, script: Path) -> list[str]:
    """Return the names, relative to the snapshot `code` and sorted by path, of its Python files
    whose live files differ by now, or are gone. `inside` is the path of the live `script` in the
    snapshot. A file that can't be read is passed over."""
    live_root = Path(*script.parts[: -len(inside.parts)])  # the snapshot is a copy of this folder
    changed = []
    for path in sorted(code.rglob("*.py")):
        name = path.relative_to(code)
        live = live_root / name
        with suppress(OSError):
            if path.is_file() and not (live.exists() and cmp(path, live, shallow=False)):
                changed.append(str(name))
    return changed


def note_script(code: Path, script: Path, inside: Path) -> None:
    """Write a note beside the snapshot `code` with the place of its script: `script` is the
    script's absolute path, `inside` its path in the snapshot. Raise OSError where the disk
    refuses."""
    write_json(_note_of_script(code), {"script": str(script), "inside": str(inside)})


def _note_of_script(code: Path) -> Path:
    """Return the path of the note that `note_script` writes."""
    return code.with_name(f".script-{code.name}")


def _list_plain_files(root: Path, runs: Path) -> Iterator[str]:
    """Walk the folder `root` without git; yield its files relative to it, except files in hidden
    folders, caches, environments and `runs`, the folder of all runs. Links to folders come as
    files, and a folder that can't be listed is left out."""
    for folder, folders, files in os.walk(root):
        parent = Path(folder)
        folders[:] = [  # in place: os.walk enters the folders that remain
            name
            for name in sorted(folders)
            if not name.startswith(".")
            and name != "__pycache__"
            and parent / name != runs
            and not (parent / name / "pyvenv.cfg").exists()
        ]
        links = [name for name in folders if (parent / name).is_symlink()]
        for name in sorted([*files, *links]):
            yield str((parent / name).relative_to(root))


def _without_runs(root: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield those of the names, relative to `root`, that lie in no folder of a run: a script that
    is started by hand has its runs in ``runs``, beside it."""
    is_run: dict[Path, bool] = {}  # of each folder, so that it is looked at once
    for name in names:
        for folder in Path(name).parents:
            if folder not in is_run:
                path = root / folder
                is_run[folder] = (path / "job.json").exists() and (path / "journal").is_dir()
        if not any(is_run[folder] for folder in Path(name).parents):
            yield name


def _select_within_limits(
    root: Path, names: Iterable[str], exclude: Sequence[str], owners: set[int]
) -> dict[str, int]:
    """Return the size in bytes of each file to copy, by its name relative to `root`.

    Left out are files that match a pattern of `exclude`, files that are gone, and all that is no
    file and no link. Left out with a note on stderr are files and links of users besides the
    `owners`, and all large weights if they do not fit together.

    Raise UsageError as soon as the files without the weights have more than 50 MB, or are more than
    20,000; OSError where a file can't be looked at.
    """
    real_root = root.resolve()
    sizes: dict[str, int] = {}
    weights: dict[str, int] = {}
    foreign: dict[str, int] = {}  # their owners
    total = 0
    for name in names:
        path = root / name
        names_of_it = name, str(real_root / name)
        if any(fnmatch(text, pattern) for text in names_of_it for pattern in exclude):
            continue
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):  # deleted, but tracked
            continue
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):  # a pipe
            continue
        if status.st_uid not in owners:  # in the copy it would be the user's, and be imported
            foreign[name] = status.st_uid
            continue
        size = status.st_size
        if size > LARGE_BYTES and path.suffix in WEIGHTS:
            weights[name] = size
            continue
        sizes[name] = size
        total += size
        if len(sizes) > LIMIT_FILES or total > LIMIT_BYTES:
            _refuse_size(root, sizes)
    for name, uid in [*foreign.items()][:1]:  # one is an example
        say(
            f"note: the copy of the code leaves out {name} of {user_name(uid)}; files of other"
            f" users: {len(foreign)}; --no-snapshot runs the live code, with them"
        )
    if total + sum(weights.values()) <= LIMIT_BYTES:
        return sizes | weights
    say(f"note: the copy of the code has no room for {_largest(weights)}")
    return sizes


def _refuse_size(root: Path, sizes: dict[str, int]) -> NoReturn:
    """Raise UsageError that the code is too large, with the three largest files; `sizes` are bytes
    by name, relative to `root`, one or more."""
    raise UsageError(
        f"the code in {root} is more than a snapshot takes ({LIMIT_BYTES // 10**6} MB,"
        f" {LIMIT_FILES:,} files); largest so far: {_largest(sizes)}",
        hint=f"put snapshot-exclude = [{max(sizes, key=lambda name: sizes[name])!r}] into"
        " hpc-ddp.toml, list it in .gitignore, or run the live code with --no-snapshot",
    )


def _largest(sizes: Mapping[str, int]) -> str:
    """Return the three largest files with their sizes, for a message; `sizes` are bytes by name."""
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    return ", ".join(f"{name} ({sizes[name] / 1e6:.1f} MB)" for name in largest)
