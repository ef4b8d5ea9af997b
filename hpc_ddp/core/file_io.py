"""Small files of a run: read whatever is in them, written in one step, and closed to other users.

Standard library only.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0  # of `patiently`
WORD_BYTES = 1 << 16  # read by `read_word`
MOST_TEXT_BYTES = 1 << 26  # of one file: a sparse file of terabytes must not fill the memory
SMALL_BYTES = 1 << 16  # of `SmallFile`
READER_THREADS = 16  # threads
ROOT = 0  # the superuser's uid
MOST_LINKS = 40  # on the way to a file
_OPENING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Lines that torch prints in every rank of every job.
NOISE = (
    r"\[W\d{4} .*socket\.cpp:\d+\] \[c10d\] The hostname of the client socket cannot be retrieved"
    r"|\[Gloo\] Rank \d+ is connected to \d+ peer ranks"
)
_RANK_MARK = re.compile(r"^\[rank\d+\]: ?", re.M)
_NOISE_LINE = re.compile(rf"^.*(?:{NOISE}).*\n?", re.M)


def patiently(act: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Call `act`, which takes no argument, and return what it returns; after an OSError call it
    again, each second. For the few actions that an attempt's end hangs on.

    An OSError that comes more than `patience_s` after the first one is raised; the first one never
    is, whatever `patience_s` is, as at the end of a job's time, or where reading a large file takes
    longer. Any other error is raised at once.
    """
    give_up: float | None = None
    while True:
        try:
            return act()
        except OSError:
            if give_up is not None and time.monotonic() > give_up:
                raise
            give_up = give_up or time.monotonic() + patience_s
            time.sleep(1)


def is_link_of_another(status: os.stat_result) -> bool:
    """Return whether a path, whose `status` `lstat` has returned, is a link that is neither this
    user's nor root's."""
    return stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), ROOT)


def check_links(path: Path, most_links: int = MOST_LINKS) -> None:
    """Raise OSError where a component of a path, or of the target of a link in it, is a link of
    another user, who could turn it to any file; where the path does not exist; and where it leads
    through more than `most_links` links. As Linux does with protected_symlinks, but in all folders,
    not only in those like /tmp."""
    path = path.absolute()
    for part in (path, *path.parents):
        status = part.lstat()
        if is_link_of_another(status):
            raise OSError(errno.ELOOP, "a link of another user", str(part))
        if stat.S_ISLNK(status.st_mode):
            if most_links == 0:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(part))
            check_links(part.parent / os.readlink(part), most_links - 1)


def open_data(path: Path) -> BufferedReader:
    """Open a file of a run that may be another user's, and return it to be read as bytes. The
    caller closes it.

    Raises
    ------
    OSError
        it can't be read, is no regular file (a pipe would wait for a writer), or lies behind a
        link of another user
    """
    check_links(path)
    descriptor = os.open(path, _OPENING)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "no regular file", str(path))


def read_text(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Return the first `most_bytes` of a file as text; bytes that are no UTF-8 are replaced. Raise
    OSError where the file can't be read, is no regular file, or lies behind a link of another
    user."""
    with open_data(path) as file:
        return file.read(most_bytes).decode(errors="replace")


@dataclass(frozen=True)
class SmallFile:
    """A file of `SMALL_BYTES` at most, and whether it is another user's."""

    content: bytes
    is_foreign: bool


def read_small_files(folder: Path, names: Sequence[str]) -> list[SmallFile | None]:
    """Return the files of a folder with these `names`, in their order; None for a file that is
    larger than `SMALL_BYTES`, no regular file, a link, or can't be read. Raise OSError where the
    folder can't be opened, or lies behind a link of another user.

    This takes a third of the time of `open_data`, since the folder's own path is followed once.
    """
    check_links(folder)
    with _open_folder(folder) as directory:
        return [_read_small(directory, name) for name in names]


class SmallFolder(NamedTuple):
    """A folder: its name, the sorted names of its entries, and some of its files by their names, as
    `read_small_files` returns them; None for a file that this function returns None for."""

    name: str
    entries: Sequence[str]
    files: Mapping[str, SmallFile | None]


def read_small_below(folder: Path, is_wanted: Callable[[str], bool]) -> Iterator[SmallFolder]:
    """Yield the folders in a folder, sorted by name, each with those of its files for whose names
    `is_wanted` is true. A folder that can't be listed, or is a link, comes as empty.

    Threads read them: a job of a thousand nodes has a folder for each. Raise OSError where the
    outer folder can't be listed, or lies behind a link of another user.
    """
    check_links(folder)
    with _open_folder(folder) as top, ThreadPoolExecutor(READER_THREADS) as pool:

        def read(name: str) -> SmallFolder:
            """Return the folder `name` of the outer one; after an error it is empty."""
            with contextlib.suppress(OSError), _open_folder(name, top, os.O_NOFOLLOW) as below:
                entries = sorted(os.listdir(below))
                files = {entry: _read_small(below, entry) for entry in filter(is_wanted, entries)}
                return SmallFolder(name, entries, files)
            return SmallFolder(name, (), {})

        with os.scandir(folder) as entries:  # it knows which are folders, without a look at each
            names = sorted(entry.name for entry in entries if entry.is_dir())
        yield from pool.map(read, names)


def _read_small(directory: int, name: str) -> SmallFile | None:
    """Return the file `name` of the folder with the descriptor `directory`; None for a file that
    `read_small_files` returns None for."""
    try:
        file = os.open(name, _OPENING | os.O_NOFOLLOW, dir_fd=directory)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        is_small = stat.S_ISREG(status.st_mode) and status.st_size <= SMALL_BYTES
        content = os.read(file, SMALL_BYTES + 1) if is_small else b""
    except OSError:
        return None
    finally:
        os.close(file)
    is_small = is_small and len(content) <= SMALL_BYTES
    return SmallFile(content, status.st_uid != os.geteuid()) if is_small else None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the object of a JSON text, which any user may have written. Raise ValueError where the
    text is no JSON, is no object, or is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. A file that is absent, can't be read, is torn, lies behind
    another user's link, or holds no object reads as {}."""
    try:
        return parse_object(read_text(path))
    except (OSError, ValueError):
        return {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object to a JSON file so that a reader sees all of it or none, and that only its
    owner can write the file. Raise OSError where the disk refuses it, and TypeError for a value
    that JSON does not have: the old file then stays."""
    write_whole(path, json.dumps(value, indent=1) + "\n", mode=0o644)


def write_whole(path: Path, text: str | bytes, mode: int = 0o666) -> None:
    """Write a file by a draft and a rename; a link at `path` is replaced, and not followed.

    The draft has a random name and is new: others may write to the folder. The umask, or a default
    ACL of the folder, takes permissions from the `mode`, and adds none. Raise OSError where the
    disk refuses it, and UnicodeEncodeError for a text with surrogates; the old file then stays.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        opener = partial(os.open, mode=mode)
        with open(draft, "xb", opener=opener) as file:  # x: it follows no link
            _limit_mode(file.fileno(), mode)
            file.write(text if isinstance(text, bytes) else text.encode())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def drafted_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder to write into. At the end of the block it is renamed to `target`, so that
    a copy that is cut off never has that name; after an error it is removed. On entry the drafts
    that earlier writers have left beside `target` are removed, too: there may be one writer at a
    time. Raise OSError where the disk refuses."""
    for leftover in target.parent.glob(".draft-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    draft = target.with_name(f".draft-{target.name}")
    try:
        draft.mkdir(parents=True)
        yield draft
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder, in no order; [] where there is no such folder. Raise OSError
    where it can't be listed: `Path.glob` would return nothing then (from Python 3.12 on), and hide
    what is there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


def read_word(path: Path) -> str:
    """Return the text of a small file, as `notice` or `failed`, without blanks around it; '' where
    the file is empty or can't be read. Only the first `WORD_BYTES` of a larger file are read. This
    asks no more of the disk than an open and a read. Links are followed, and a pipe is waited
    for."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, WORD_BYTES).decode(errors="replace").strip()
        finally:
            os.close(file)
    except OSError:
        return ""


def read_seconds(path: Path) -> float | None:
    """Return the number in a file like `end-time`, as `float` reads it (``inf``, too); None where
    the file is missing, empty or no number."""
    try:
        return float(read_word(path))
    except ValueError:
        return None


def read_tail(path: Path, size_bytes: int) -> str:
    """Return the last `size_bytes` of a log as text, without the lines of `NOISE`, and without the
    mark of the rank that torch or hpc-ddp puts before a line; '' where the log can't be read."""
    try:
        with open_data(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size_bytes))
            text = file.read(size_bytes).decode(errors="replace")
    except (OSError, ValueError):
        return ""
    return _NOISE_LINE.sub("", _RANK_MARK.sub("", text))


def parse_python(path: Path, text: bytes) -> ast.Module:
    """Return the syntax tree of the Python file `path` with the content `text`; warnings of that,
    as for ``"\\d"``, are not printed. Raise SyntaxError or ValueError where it is no Python, or
    too deeply nested for its parser."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (RecursionError, MemoryError) as error:
            raise ValueError(f"{path} is too deeply nested") from error


def make_private(path: Path, folders: Sequence[str], is_new: bool) -> None:
    """Make a folder of mode 0700, and `folders` in it; missing folders above it are made so that
    their owner alone can write them. A folder that exists gets the mode 0700, or with `is_new` is
    refused.

    All is done by descriptors: where another user puts something in the place of a new folder
    meanwhile, such as a link to a folder of this user's, that stays as it is.

    Raises
    ------
    FileExistsError
        `is_new`, and the folder exists already
    OSError
        a folder can't be made, or has been replaced
    """
    make_folders(path.parent)
    with _open_folder(path.parent) as parent:
        # A folder that exists is an error only if `is_new`.
        with contextlib.suppress(*() if is_new else (FileExistsError,)):
            os.mkdir(path.name, 0o700, dir_fd=parent)
        with _open_folder(path.name, parent, os.O_NOFOLLOW if is_new else 0) as top:
            if is_new and os.listdir(top):  # another folder, in the place of the new one
                raise FileExistsError(errno.EEXIST, "was made meanwhile", str(path))
            set_folder_mode(top, 0o700)
            for name in folders:
                _make_folder(name, top)


def make_folders(path: Path) -> None:
    """Make a folder, and those above that are missing, so that only their owner can write them; a
    folder that exists stays as it is. Raise OSError where one can't be made.

    The umask says little of a new folder's mode: a project's group may have 002, and the default
    ACL of a folder above, which a project's files often get, takes the umask's place.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        _make_folder(folder)


def _make_folder(path: Path | str, parent: int | None = None) -> None:
    """Make one folder that only its owner can write; one that exists stays as it is. A relative
    `path` begins at the folder with the descriptor `parent` (None: at the working directory). Raise
    OSError where it can't be made."""
    try:
        os.mkdir(path, 0o755, dir_fd=parent)
    except FileExistsError:
        return
    with _open_folder(path, parent, os.O_NOFOLLOW) as folder:
        _limit_mode(folder, 0o755)


def set_folder_mode(folder: Path | int, mode: int) -> None:
    """Set the nine bits of a folder's `mode`, by path or descriptor. The setgid bit, by which the
    files of a project's folder belong to its group and count for its quota, stays as it is. Raise
    OSError where that is refused."""
    os.chmod(folder, os.stat(folder).st_mode & stat.S_ISGID | mode)


def _limit_mode(descriptor: int, mode: int) -> None:
    """Remove from a new file or folder the permissions beyond the `mode` with which it was made:
    some file systems look only at the ACL of the folder above. Raise OSError where that is
    refused."""
    present = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if present & 0o777 & ~mode:
        os.fchmod(descriptor, present & (mode | ~0o777))  # the bits above, as setgid, stay


@contextlib.contextmanager
def _open_folder(path: Path | str, parent: int | None = None, flags: int = 0) -> Iterator[int]:
    """Yield the descriptor of a folder, which is closed at the end of the block. A relative `path`
    begins at the folder with the descriptor `parent` (None: at the working directory). `flags` are
    further ones of `os.open`. Raise OSError where the folder can't be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def close_to_others(top: Path) -> None:
    """Remove the permission to write from a folder and all below it, for all users but the owner.
    Links stay as they are. Raise OSError where `top` is missing, or a mode can't be changed.

    A copy has its original's mode, whatever the umask, and a default ACL takes the umask's place:
    so the umask does not keep other users from files that are executed and believed.
    """
    for path in (top, *top.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & 0o022:
            path.chmod(stat.S_IMODE(mode) & ~0o022)
