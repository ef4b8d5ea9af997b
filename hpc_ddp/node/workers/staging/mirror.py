"""A tree that mirrors an environment: copies of files that were opened, and links to all else.

A folder with an opened file is a folder of the tree. The other entries of that folder are links to
the environment, so that a module, a data file or a library that was not opened is found, too.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import source_from_cache
from io import BytesIO
from pathlib import Path

from hpc_ddp.core.attempt_env import OPENED_FILES
from hpc_ddp.core.file_io import list_names

TREE = "@HPC_DDP_NEAR@"  # in place of the tree's path, which only a node knows
SITES = ("site-packages", "dist-packages", "conda-meta")  # that an install changes
IMPORTED = ("bin", "lib", "lib64", "pyvenv.cfg")  # what Python imports from, in its prefix
USER_SITE = r"(?<=/\.local)/lib/python[\d.]+/site-packages$"  # the user's, behind its prefix
MOST_DATA_BYTES = 64 << 20  # of a file that is no library


@dataclass
class Mirror:
    """The content of a tree; all paths are the real ones of the environment.

    Attributes
    ----------
    roots
        folders of the environment as Python spells them, perhaps by way of links
    written
        files that the job writes: these are not copied
    files
        size in bytes and time of change in ns of each file to copy, by path
    folders
        folders of the tree: each entry of one is in the tree as a file, a folder or a link
    pythons
        executables, as the processes that opened the files spell their own
    """

    roots: frozenset[str]
    written: frozenset[str] = frozenset()
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    pythons: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Set `_tops`, the prefixes of the environment, and `_places`, the folders and files there
        from which Python imports; both as beginnings of paths."""
        reals = {root: os.path.realpath(root) for root in self.roots}
        sites = [f"{real}/" for root, real in reals.items() if os.path.basename(root) in SITES]
        self._tops = tuple(f"{re.sub(USER_SITE, '', real)}/" for real in reals.values())
        self._places = (*sites, *(f"{top}{name}/" for top in self._tops for name in IMPORTED))

    def add(self, path: str) -> None:
        """Add a path that a process has opened or listed: a folder to `folders`; a file to `files`,
        and its folder to `folders`, also where the file does not exist. With compiled Python
        (``.pyc``) its source is added, too. Left out are paths from which Python does not import,
        large data files, files that the job writes and files that can't be read; an OSError is
        passed over."""
        parent = os.path.realpath(os.path.dirname(path))
        real = os.path.realpath(path)
        # Some installers make an environment of links to a store outside: then the link counts.
        place = real if self.has(real) else os.path.join(parent, os.path.basename(path))
        if not self.has(place) or not place.isprintable():
            return
        with suppress(OSError):
            if os.path.isdir(place):  # a link may lead to code that the user edits
                return None if os.path.islink(place) else self._add_folder(place)
            if os.path.isfile(place) and real not in self.written and os.access(place, os.R_OK):
                status = os.stat(place)
                if status.st_size <= MOST_DATA_BYTES or re.search(r"\.so(\.|$)", place):
                    self.files[place] = (status.st_size, status.st_mtime_ns)
            for folder in filter(os.path.isdir, (parent, os.path.dirname(place))):
                self._add_folder(folder)
        if place.endswith(".pyc") and os.path.basename(parent) == "__pycache__":
            with suppress(ValueError):  # Python compares the source's time with the compiled file
                self.add(source_from_cache(place))

    def leave_out(self, written: set[str]) -> None:
        """Remove the paths `written`, which the job writes, from `files`; `add` leaves them out
        from now on."""
        self.written |= {*written, *map(os.path.realpath, written)}
        self.files = {path: pair for path, pair in self.files.items() if path not in self.written}

    def has(self, path: str) -> bool:
        """Return whether a path lies in a place of the environment from which Python imports. Data,
        and code that the user edits, may lie elsewhere."""
        return f"{path}/".startswith(self._places)

    def _add_folder(self, path: str) -> None:
        """Add a folder, and all folders above it in its prefix, to `folders`; do nothing for a
        folder that is in no prefix."""
        while f"{path}/".startswith(self._tops) and path not in self.folders:
            self.folders.add(path)
            path = os.path.dirname(path)

    def add_searched(self) -> None:
        """Add to `folders` the subfolders in which Python only looks for an ``__init__``: packages
        in site-packages, for which a program may search, and subfolders that have the name of a
        module beside them. Raise OSError for a folder that can't be listed."""
        for folder in sorted(filter(self.has, self.folders)):
            is_site = os.path.basename(folder) in SITES
            with os.scandir(folder) as entries:
                is_folder = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
            modules = {name.partition(".")[0] for name in is_folder if not is_folder[name]}
            for path in (os.path.join(folder, name) for name in is_folder if is_folder[name]):
                is_package = is_site and os.path.exists(os.path.join(path, "__init__.py"))
                if is_package or os.path.basename(path) in modules:
                    self.folders.add(path)

    def stamps(self) -> dict[str, int]:
        """Return the times of change, in unix seconds by path, by which a start sees whether the
        environment has changed: of the Pythons, of ``pyvenv.cfg``, and of the folders that an
        install changes; sorted by path. Raise OSError where one of these is gone."""
        paths = [path for path in self.folders if os.path.basename(path) in SITES]
        paths += [path for path in self.files if path.endswith("/pyvenv.cfg")]
        paths += [path for path in self.files if re.search(r"/bin/python[\d.]*$", path)]
        metadata = (os.path.join(top, "conda-meta") for top in self._tops)
        paths += [path for path in metadata if os.path.isdir(path)]
        return {path: int(os.stat(path).st_mtime) for path in sorted({*paths})}

    def root_lines(self) -> list[str]:
        """Return lines of the label for the roots that lie behind a link: ``spelled PATH`` for each
        root, as Python spells it, then ``real PATH`` for each root in the same order. A start
        compares them, since a link may later lead to another environment."""
        roots = [root for root in sorted(self.roots) if os.path.realpath(root) != root]
        spelled = [f"spelled {root}" for root in roots]
        return spelled + [f"real {os.path.realpath(root)}" for root in roots]

    def program_lines(self) -> list[str]:
        """Return lines of the label: ``programs`` alone, then ``programs PATH`` for each folder of
        the tree that has one of `pythons`, as Python spells it, and for its real path. A start
        looks for its Python there before it reads the parcel."""
        spelled = {os.path.dirname(python) for python in self.pythons}
        folders = {path for path in spelled if os.path.realpath(path) in self.folders}
        folders |= {os.path.realpath(path) for path in folders}
        return ["programs", *(f"programs {path}" for path in sorted(folders))]

    def links(self) -> Iterator[tuple[str, str]]:
        """Yield path and target of all links of the tree: of the entries of `folders` that are not
        copied, and of the roots that Python spells by way of links. Links between folders of the
        tree, and those of roots, have a relative target, inside the tree; other targets are
        absolute. Raise OSError for a folder that can't be listed."""
        for folder in sorted(self.folders):
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.path in self.files or entry.path in self.folders:
                        continue
                    target = entry.path
                    if entry.is_symlink():
                        text = os.path.join(folder, os.readlink(entry.path))
                        target = os.path.normpath(text)
                        # normpath is wrong for a .. behind a link.
                        if os.path.realpath(target) != os.path.realpath(text):
                            target = os.path.realpath(text)
                    is_inside = entry.is_symlink() and os.path.dirname(target) in self.folders
                    yield entry.path, os.path.relpath(target, folder) if is_inside else target
        for root in self.roots:
            real = os.path.realpath(root)
            is_inner = any(root.startswith(f"{outer}/") for outer in self.roots)
            if real != root and not is_inner and os.path.dirname(root) not in self.folders:
                yield root, os.path.relpath(real, os.path.dirname(root))

    def rewritten_texts(self) -> dict[str, bytes]:
        """Return new texts, by path, for the ``pyvenv.cfg`` and ``.pth`` files that name folders of
        the tree: in the new texts `TREE` stands before these paths. Raise OSError for a file that
        can't be read."""
        texts = {}
        for path in self.files:
            if path.endswith(("/pyvenv.cfg", ".pth")):
                text = Path(path).read_text(errors="surrogateescape")
                # A line of pyvenv.cfg is ``home = PATH``, a line of a .pth file a path.
                new = re.sub(r"(?m)^(home\s*=\s*|)(/.*)$", self._turn_into_tree, text)
                if new != text:
                    texts[path] = new.encode(errors="surrogateescape")
        return texts

    def _turn_into_tree(self, line: re.Match[str]) -> str:
        """Return a `line` of `rewritten_texts` (group 2 is its path), with `TREE` before the path
        if that is a folder of the tree."""
        path = os.path.realpath(line[2].strip())
        is_inside = self.has(path) and path in self.folders
        return f"{line[1]}{TREE if is_inside else ''}{line[2]}"

    def pack(self, draft: Path) -> list[str]:
        """Write the tree to the file `draft` as an uncompressed tar: folders, then links, then
        files. Return the sorted paths of the files that have new texts. A file that has changed
        since `add` becomes a link, and is removed from `files`. Raise OSError where a file can't be
        read, or `draft` can't be written."""
        new_texts = self.rewritten_texts()
        with tarfile.open(draft, "w", format=tarfile.GNU_FORMAT) as tar:
            for folder in sorted(self.folders):
                tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o700))
            for path, target in self.links():
                tar.addfile(_entry(path, tarfile.SYMTYPE, 0o777, target))
            for path, size_and_time in sorted(self.files.items()):
                if not _add_file(tar, path, size_and_time, new_texts.get(path)):
                    del self.files[path]
                    tar.addfile(_entry(path, tarfile.SYMTYPE, 0o777, path))
        return sorted(new_texts.keys() & self.files.keys())

    def libraries(self) -> list[str]:
        """Return the paths of Python's own shared libraries (``libpython…so``) among `files`: some
        Pythons look for theirs where they were installed, and not beside themselves."""
        return [path for path in self.files if re.search(r"/libpython[^/]*\.so[^/]*$", path)]


def _entry(path: str, kind: bytes, mode: int, target: str = "") -> tarfile.TarInfo:
    """Return the header of the tar's member for a path of the environment, with tarfile's `kind`
    and, for a link, its `target`."""
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.type, entry.mode, entry.linkname = kind, mode, target
    return entry


def _add_file(
    tar: tarfile.TarFile, path: str, size_and_time: tuple[int, int], new_text: bytes | None
) -> bool:
    """Add a file to the tar, with `new_text` as its content if that is not None, and with its own
    time, since Python compares the time of a source with its compiled file; return True. Return
    False, and add nothing, where the file's size or time (in ns) is no longer `size_and_time`.
    Raise OSError where the file can't be read."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != size_and_time:
            return False
        entry = _entry(path, tarfile.REGTYPE, status.st_mode & 0o755)
        entry.mtime = int(status.st_mtime)
        entry.size = status.st_size if new_text is None else len(new_text)
        tar.addfile(entry, file if new_text is None else BytesIO(new_text))
    return True


def find_written(tree: Path, packed: Iterable[str]) -> set[str]:
    """Return those of the paths `packed` whose copy in `tree` the job has written: they are younger
    than the tree's mark (``.complete``), which is younger than all that was unpacked. Compiled
    files, which Python itself writes, don't count. The set is empty without a mark."""
    written = set()
    with suppress(OSError):
        began = tree.with_name(f"{tree.name}.complete").stat().st_mtime_ns
        for path in packed:
            with suppress(FileNotFoundError, NotADirectoryError):  # the job has removed it
                status = os.lstat(f"{tree}{path}")
                is_new = stat.S_ISREG(status.st_mode) and status.st_mtime_ns > began
                if is_new and not path.endswith(".pyc"):
                    written.add(path)
    return written


def mapped_files(record: Path) -> set[str]:
    """Return the paths of the files that are mapped by processes whose environment has them note to
    the file `record`: mostly libraries, also those that the system's loader has opened. Raise
    OSError where /proc can't be listed."""
    paths, mark = set(), f"{OPENED_FILES}={record}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if mark not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                continue
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            rows = (line.split(None, 5) for line in lines)  # the sixth field, if any, is the path
            paths |= {row[5] for row in rows if len(row) == 6 and row[5][0] == "/"}
    return paths


def mirror_of(record: Path, lines: Iterable[str]) -> Mirror:
    """Return the mirror of an environment. `lines` are the notes of `sitecustomize` in the file
    `record`: the path of an opened file or a listed folder; ``root PATH``, a folder of the
    environment; ``python PATH``, an executable; ``written PATH``, a file that the job writes. Other
    lines are ignored. The mirror has, besides, the files that processes have mapped, and those that
    Python reads before ``sitecustomize``: ``pyvenv.cfg`` and ``*.pth``.

    `record` lies in the run's folder on this node; a path in a tree there counts as the path of the
    environment that the tree mirrors. Raises OSError where a folder, or /proc, can't be listed.
    """
    in_tree = re.compile(rf"^{re.escape(str(record.parent))}/environment-[^/]*(?=/)")
    paths = _paths_by_kind(lines, in_tree)
    roots = paths["root"]
    mirror = Mirror(frozenset(roots), frozenset(map(os.path.realpath, paths["written"])))
    mirror.pythons = frozenset(in_tree.sub("", path) for path in paths["python"])
    for path in sorted(paths[""] | mapped_files(record) | paths["python"]):
        mirror.add(in_tree.sub("", path))
    for root in roots:
        mirror.add(os.path.join(root, "pyvenv.cfg"))
        for name in list_names(Path(root)):
            if name.endswith(".pth"):
                mirror.add(os.path.join(root, name))
    mirror.add_searched()
    return mirror


def _paths_by_kind(lines: Iterable[str], in_tree: re.Pattern[str]) -> dict[str, set[str]]:
    """Return the paths in the `lines` of a record, by the word before them: ``root``, ``python`` or
    ``written``, '' for a path without a word. `in_tree` matches the beginning of a path that lies
    in a tree; this beginning is left out of the path."""
    paths: dict[str, set[str]] = {"root": set(), "python": set(), "written": set(), "": set()}
    for line in lines:
        kind, _, path = ("", "", line) if line.startswith("/") else line.partition(" ")
        if path and kind in paths:
            paths[kind].add(in_tree.sub("", path))
    return paths
