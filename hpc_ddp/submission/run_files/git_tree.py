"""The git work tree that a script lies in: its files are the script's code."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import ROOT

# A hook of git, or `git rebase --exec`, has these of a repository, which need not be the script's.
_OF_A_REPOSITORY = {
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_PREFIX"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE"),
}
# The work tree may be another user's, where `safe.directory` lets git in: it runs nothing of it.
GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")


def _call_git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Call git in a folder, and return the ended process with its output, also after an error of
    git; git fetches nothing from a remote. Raise FileNotFoundError without git."""
    # To fetch a missing object of a partial clone, git would run the repository's sshCommand.
    env = {n: text for n, text in os.environ.items() if n not in _OF_A_REPOSITORY}
    env["GIT_ALLOW_PROTOCOL"] = "none"
    return subprocess.run([*GIT, "-C", str(folder), *words], env=env, capture_output=True)


def find_work_tree(script: Path, owners: Set[int] = frozenset()) -> Path | None:
    """Return the top of the git work tree that `script` lies in, as a parent of the script's own
    path (a home may be a link). Return None without git or a work tree, where git refuses, where a
    link from outside leads below the tree's top, and for a tree that has the user's home in it.
    None also where the tree, its ``.git`` or the folder to which ``.git`` leads belongs to a user
    who is not among the `owners` (empty: `trusted_owners`): another user could make a tree above
    the user's folder, as in /scratch, and decide which files belong to it."""
    try:
        top, git_folder = (
            _call_git(script.parent, "rev-parse", word) for word in ("--show-toplevel", "--git-dir")
        )
    except FileNotFoundError:
        return None
    if top.returncode or git_folder.returncode:
        return None
    real_root, settings = (
        script.parent / os.fsdecode(ended.stdout.removesuffix(b"\n")) for ended in (top, git_folder)
    )
    roots = (folder for folder in script.parents if os.path.realpath(folder) == str(real_root))
    # A user without a home ("~" stays) counts as one with "/" as the home.
    home = os.path.realpath(os.path.expanduser("~")) if os.path.expanduser("~") != "~" else "/"
    if not (root := next(roots, None)) or Path(home).is_relative_to(real_root):
        return None
    marks = [path for path in (root, root / ".git", settings) if os.path.lexists(path)]
    present = {mark.lstat().st_uid for mark in marks} | {settings.stat().st_uid}
    return root if present <= (owners or trusted_owners(script)) else None


def trusted_owners(script: Path) -> set[int]:
    """Return the ids of the users whose files beside `script` count as the user's code: this user,
    root, and the script's owner, whose code runs in any case."""
    owners = {os.geteuid(), ROOT}
    with suppress(OSError):  # of a module that has no file
        owners.add(script.stat().st_uid)
    return owners


def list_files(root: Path, runs: Path, owners: Set[int]) -> Iterator[str]:
    """Yield the files of the work tree `root`, relative to it: tracked ones, and untracked ones
    that are neither ignored nor in `runs`, the folder of all runs; also the files of submodules,
    except those of users besides the `owners`. Notes on stderr name other git repositories in the
    tree. A tracked file may be gone; a file in conflict comes several times. Raise UsageError where
    git refuses."""
    words = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    runs, top = (Path(os.path.realpath(folder)) for folder in (runs, root))
    if runs.is_relative_to(top) and runs != top:
        # The signs that have a meaning in .gitignore are quoted.
        pattern = re.sub(r"([*?\[\\ ])", r"\\\1", str(runs.relative_to(top)))
        words.append(f"--exclude=/{pattern}/")
    listing = _call_git(root, *words)
    if listing.returncode:
        reason = listing.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise UsageError(
            f"git can't list the files of {root}: {reason}", hint=f"git -C {root} status"
        )
    for name in map(os.fsdecode, filter(None, listing.stdout.split(b"\0"))):
        path = root / name
        if name.endswith("/"):  # a clone that is no submodule, or a work tree
            say(f"note: the copy of the code leaves out {name}, a git repository of its own")
        elif not (path / ".git").exists() or path.is_symlink():
            yield name
        elif find_work_tree(path / ".git", owners):  # a submodule
            for inside in list_files(path, runs, owners):
                yield os.path.join(name, inside)
