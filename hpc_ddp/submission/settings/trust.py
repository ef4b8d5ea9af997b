"""Settings files and templates that may act for the user: the user's, root's, and accepted ones.

Such a file decides what a job runs, and a template is a program. ``hpc-ddp trust`` accepts any
other file in its present state; the record is ``~/.config/hpc-ddp/trusted.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
import sys
from pathlib import Path
from typing import Any

from hpc_ddp.core import file_io, file_owners
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.submission.package_files import is_shipped
from hpc_ddp.submission.settings.user import home_folder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECORD = ".config/hpc-ddp/trusted.json"


def read_trusted(path: Path) -> bytes:
    """Return the content of a file that may act for the user.

    The opened file is checked, not the file of its name, so that no other file can be put in its
    place between the check and the reading.

    Raises
    ------
    UsageError
        the user has not accepted the file as it is now, and it, or a link to it, belongs to a user
        other than this one and root, other users can write it, all users can replace it, or it is
        no regular file. Also where the record of accepted files can't be used
    OSError
        the file can't be read
    """
    content, status, others_can_write = _read_opened(path)
    fault = _find_fault(path, status, others_can_write)
    if fault and (accepted := _read_record()).get(_key(path)) != _entry(content, status):
        change = ", and has changed since it was accepted" if _key(path) in accepted else ""
        raise UsageError(
            f"{path} is not used: {fault}{change}; accepted: a file that belongs to you or to root,"
            " and that no other user can write or replace",
            hint=_hint(path, status, others_can_write),
        )
    return content


def _hint(path: Path, status: os.stat_result, others_can_write: bool) -> str:
    """Return the hint for a file that may not act for the user: the command that mends its mode
    (`others_can_write`), or the one that accepts it."""
    if status.st_uid == os.geteuid() and others_can_write:
        return f"chmod go-w {_quoted(path)}; or, as it is now: hpc-ddp trust {_quoted(path)}"
    return f"read it; if it may decide what your jobs run: hpc-ddp trust {_quoted(path)}"


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values in a TOML file, by key.

    Raises
    ------
    UsageError
        the file is missing or can't be read, or isn't TOML (the message has the line); a text in it
        has a NUL; or the file may not act for the user (see `read_trusted`). A file that came with
        hpc-ddp always may
    """
    try:
        content = path.read_bytes() if is_shipped(path) else read_trusted(path)
        values: dict[str, Any] = tomllib.loads(content.decode("utf-8-sig"))
        if _has_nul(values):
            raise tomllib.TOMLDecodeError("a text has a NUL, which no path or argument can have")
        return values
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} can't be read as TOML: {error}", hint=f"look at {path}") from None


def _has_nul(entry: object) -> bool:
    """Return whether a text or a key of a TOML file, or of a part of it, has a NUL."""
    if isinstance(entry, dict):
        entry = [*entry, *entry.values()]
    return any(map(_has_nul, entry)) if isinstance(entry, list) else "\0" in str(entry)


def accept_file(path: Path) -> None:
    """Write into the record that a file may act for the user as long as its content and owner stay
    the same.

    Raises
    ------
    UsageError
        the file can't be read, or is no regular file; or the present record can't be used
    HpcDdpError
        the record can't be written
    """
    try:
        content, status, _ = _read_opened(path)
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror}", hint=f"ls -l {_quoted(path)}"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is no regular file; accepted: a TOML file or a template")
    _write_record({**_read_record(), _key(path): _entry(content, status)})


def _read_opened(path: Path) -> tuple[bytes, os.stat_result, bool]:
    """Open a file once; return its content (b'' if it is no regular file), its status, and whether
    other users can write it. A link is followed. Raise OSError where the file can't be opened or
    read."""
    # realpath has followed all links: a link at its result, O_NOFOLLOW, was put there since.
    # Without O_NONBLOCK the open of a FIFO would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(os.path.realpath(path), flags), "rb") as file:
        status = os.fstat(file.fileno())
        others_can_write = file_owners.is_writable_by_others(status, file.fileno())
        return file.read() if stat.S_ISREG(status.st_mode) else b"", status, others_can_write


def _find_fault(path: Path, status: os.stat_result, others_can_write: bool) -> str:
    """Return the reason, as text, why an opened file may not act for the user; '' where it may. It
    comes from a link at `path`, and from the file's folder, `status` and `others_can_write` (see
    `_read_opened`). Raise OSError where the file is gone."""
    uid = os.geteuid()
    link = path.lstat()
    if file_io.is_link_of_another(link):
        return f"it is a symbolic link that belongs to {file_owners.user_name(link.st_uid)}"
    folder = Path(os.path.realpath(path)).parent.stat()
    return file_owners.file_fault(status, folder, uid, others_can_write)


def _key(path: Path) -> str:
    """Return the key of a file in the record: the real path of its folder, with the file's own
    name."""
    # All spellings of the folder give one key. A link to a file has a key of its own: relative
    # paths in the file are seen from the link's folder.
    return os.path.join(os.path.realpath(path.absolute().parent), path.name)


def _entry(content: bytes, status: os.stat_result) -> dict[str, Any]:
    """Return the record's entry for a file: its owner's number and the digest of its content."""
    return {"owner": status.st_uid, "sha256": hashlib.sha256(content).hexdigest()}


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _read_record() -> dict[str, Any]:
    """Return the entries of the accepted files, by `_key`; {} where there is no record.

    Raises
    ------
    UsageError
        the record can't be read, may be another user's work, or is broken; or the user has no home
        folder
    """
    path = home_folder() / RECORD
    try:
        content, status, others_can_write = _read_opened(path)
        values = json.loads(content)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}", hint=f"rm {_quoted(path)}") from None
    fault = _find_fault(path, status, others_can_write)
    if not (fault or isinstance(values, dict)):
        fault = "it holds no JSON object"
    if fault:
        raise UsageError(
            f"{path} is not used: {fault}; accepted: a file that only you can write",
            hint=f"rm {_quoted(path)}, and accept again what you need",
        )
    return dict(values)


def _write_record(values: dict[str, Any]) -> None:
    """Replace the record by `values`, the entries by `_key`, in one step; make its folder where it
    is missing. Raise HpcDdpError where the disk refuses, UsageError without a home folder."""
    path = home_folder() / RECORD
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(values, file, indent=1)
        draft.replace(path)
    except OSError as error:
        raise HpcDdpError(
            f"{path} can't be written: {error.strerror}", hint="df ~; ls -ld ~"
        ) from None
