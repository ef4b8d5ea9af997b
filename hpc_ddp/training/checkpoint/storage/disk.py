"""Checkpoints as files: write, publish, set aside, remove. Knows nothing of ranks or models.

`hpc_ddp.core.checkpoints` has the names, and the reader's side.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from hpc_ddp.core.checkpoints import (
    CHUNK_BYTES,
    MANIFEST,
    FileFacts,
    manifest_crc,
    step_of,
    verify,
)
from hpc_ddp.core.file_io import close_to_others, set_folder_mode

# Checkpoints that this process has written, or loaded, and so verified: a terabyte takes minutes.
intact: set[Path] = set()


def write_file(
    path: Path, *content: bytes | memoryview, offset: int = 0, ends: bool = True
) -> FileFacts:
    """Write the parts of `content`, one after the other, into a file from byte `offset` on; make
    them durable; return their size and CRC32. A missing file is made.

    With `ends` the file is cut off behind the content; without it other processes may write other
    bytes of the file at the same time. A new file's name is durable only after `sync` of its
    folder. The slow calls release the interpreter lock, so a thread that writes takes microseconds
    from a training. Raise OSError if the disk refuses; bytes that were written stay.
    """
    views = [memoryview(part).cast("B") for part in content]
    size = sum(map(len, views))
    # Where other users may write to the folder, one of them may have put a link there: O_NOFOLLOW.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    with open(handle, "wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        file.seek(offset)
        for view in views:
            while len(view):
                view = view[file.write(view[:CHUNK_BYTES]) :]
        if ends:
            file.truncate(offset + size)
        sync_call = pool.submit(os.fsync, file.fileno())
        crc32 = 0
        for view in views:  # while the disk is busy
            crc32 = zlib.crc32(view, crc32)
        sync_call.result()
    return FileFacts(size, crc32)


def write_manifest(
    folder: Path, facts: dict[str, Any], files: Mapping[str, Sequence[FileFacts]]
) -> None:
    """Write the manifest, which makes `folder` a checkpoint; make the manifest and the names in the
    folder durable. Other users can't write the manifest, whatever the umask.

    `facts` are plain values for readers, such as the step; `files` has the facts on each file's
    parts, in their order, by the file's name. Raise OSError if the disk refuses; the manifest may
    be there then.
    """
    entries = {name: _entry_of(parts) for name, parts in sorted(files.items())}
    manifest: dict[str, Any] = {**facts, "files": entries}
    manifest["crc32"] = manifest_crc(manifest)
    write_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    close_to_others(folder / MANIFEST)
    sync(folder)


def _entry_of(parts: Sequence[FileFacts]) -> dict[str, Any]:
    """Return the manifest's entry of a file from the facts on its parts."""
    if len(parts) == 1:
        return asdict(parts[0])
    return {"size": sum(part.size for part in parts), "parts": list(map(astuple, parts))}


def check_space(folder: Path, size: int, files: int) -> None:
    """Raise OSError (ENOSPC) where a folder's file system lacks room for `size` bytes or `files`
    files; any other OSError if the file system does not answer.

    A total of 0, and a negative number of what is free, is a file system's word for "not known":
    CephFS has -1 inodes free, at all times.
    """
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if space.f_blocks and 0 <= free < size:  # some file systems report no sizes at all
        raise OSError(
            errno.ENOSPC, f"No space left for {size / 1e6:.1f} MB: {free / 1e6:.1f} MB are free"
        )
    if space.f_files and 0 <= space.f_favail < files:
        raise OSError(errno.ENOSPC, f"No space left for {files} files: {space.f_favail} inodes")


def draft(folder: Path, step: int, attempt: int) -> Path:
    """Return the folder into which an attempt writes the checkpoint of a step; it is not made."""
    return folder / f"step-{step}.tmp-{attempt}"


def make_draft(folder: Path, is_private: bool = False) -> None:
    """Make a draft's folder unless there is one, and close it to other users, whatever the umask.
    A link, or another user's folder, is removed first: files that are written into it would end up
    elsewhere. Raise OSError if the folder can't be made, or if it can't be closed and is to be
    private (`is_private`)."""
    is_own = False
    folder.parent.mkdir(exist_ok=True)  # without parents: a run that was moved away stays away
    with suppress(FileNotFoundError):
        status = folder.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own:
            remove(folder)
    folder.mkdir(mode=0o700, exist_ok=is_own)
    try:
        set_folder_mode(folder, 0o700)
    except OSError:  # a disk without modes
        if is_private:
            raise


def publish(draft_folder: Path, attempt: int, most_mode: int = 0o777) -> Path:
    """Rename a complete draft to its final name, durably; add the new path to `intact`, and return
    it. The folder gets the rights of the folder of all checkpoints, but none beyond `most_mode`.

    An older folder of that name is renamed first, as where the step was saved before and after the
    code at the end of an epoch: to `.old-` if it is in `intact` or verifies, for which all of it is
    read, else to `.bad-`. Raise OSError if a rename fails, or if the sync behind the last rename
    fails: the draft then has its final name.
    """
    final = draft_folder.with_name(f"step-{step_of(draft_folder)}")
    if final.exists():
        is_damaged = final not in intact and verify(final)
        set_aside(final, "bad" if is_damaged else "old", attempt)
    with suppress(OSError):  # the checkpoint is good for its owner in any case
        set_folder_mode(draft_folder, 0o700 | final.parent.stat().st_mode & most_mode)
    draft_folder.rename(final)
    intact.add(final)
    sync(final.parent)
    return final


def set_aside(folder: Path, kind: str, attempt: int) -> Path:
    """Rename a checkpoint to ``step-<n>.<kind>-<attempt>`` and return the new path. `kind` is
    ``old`` or ``bad``.

    If a folder has that name, it is removed with ``old``; with ``bad`` the new name gets a further
    number. Raise OSError if the rename fails.
    """
    stem = f"step-{step_of(folder)}.{kind}-{attempt}"
    path = folder.with_name(stem)
    if kind == "old":
        remove(path)
    tries = 0
    while path.exists():
        tries += 1
        path = folder.with_name(f"{stem}-{tries}")
    return folder.rename(path)


def clear_drafts(folder: Path) -> None:
    """Remove the half-written checkpoints in a folder, which earlier attempts, or this one's
    workers before a restart, have left.

    It raises nothing: what can't be listed or removed stays for the next start.
    """
    with suppress(OSError):
        for path in folder.glob("step-*.tmp-*"):
            remove(path)


def remove(path: Path) -> None:
    """Remove the folder of a checkpoint or a draft, or a link in its place. The folder may be
    missing, and another process may remove it at the same time.

    The folder is renamed to ``step-<n>.tmp-gone`` first: a kill in between leaves no half
    checkpoint. No error is raised: a folder that can't be renamed stays as it is, and a file that
    can't be removed, as NFS keeps one while a process has it open, stays in the renamed folder.
    """
    to_remove = path.with_name(f"{path.name.partition('.')[0]}.tmp-gone")
    for link in (path, to_remove):
        with suppress(OSError):
            if link.is_symlink():  # another user's, say
                link.unlink()
    with suppress(OSError):
        shutil.rmtree(to_remove, ignore_errors=True)  # which an earlier call may have left
        path.rename(to_remove)
    shutil.rmtree(to_remove, ignore_errors=True)


def sync(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder; raise OSError if the disk
    refuses."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
