"""Checkpoints as files: write, publish, set aside, remove. Knows nothing of ranks or models.

`hpc_ddp.core.checkpoints` has the names, and the reader's side.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from hpc_ddp.core.checkpoints import (
    CHUNK,
    MANIFEST,
    FileFacts,
    manifest_crc,
    step_of,
    verify,
)
from hpc_ddp.core.file_io import close_to_others


def write_file(
    path: Path, *content: bytes | memoryview, offset: int = 0, ends: bool = True
) -> FileFacts:
    """Write the bytes of `content` in a row from byte `offset` of a file on, which is made where
    there is none; make them durable, and return their size and CRC32.

    Other processes may write other bytes of the file. With `ends` it ends after these. Its name is
    durable after `sync` only. Writing, syncing and summing all release the
    interpreter lock, so a thread that does this takes microseconds of it from a training beside it.
    Raise OSError; what was written then stays.
    """
    views = [memoryview(part).cast("B") for part in content]
    size = sum(map(len, views))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with open(handle, "wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        file.seek(offset)
        for view in views:
            while len(view):
                view = view[file.write(view[:CHUNK]) :]
        if ends:
            file.truncate(offset + size)
        synced = pool.submit(os.fsync, file.fileno())
        crc32 = 0
        for view in views:  # while the disk is busy
            crc32 = zlib.crc32(view, crc32)
        synced.result()
    return FileFacts(size, crc32)


def write_manifest(
    folder: Path, facts: dict[str, Any], files: Mapping[str, Sequence[FileFacts]]
) -> None:
    """Write the manifest, which makes the folder a checkpoint, and make both durable; others can't
    write it, whatever the umask.

    `facts` are plain values for readers, such as the step; `files` has the parts of each file in
    their order, by its name. Raise OSError if the disk refuses; the manifest may be there then.
    """
    value = {**facts, "files": {name: _entry_of(parts) for name, parts in sorted(files.items())}}
    value["crc32"] = manifest_crc(value)
    write_file(folder / MANIFEST, json.dumps(value, indent=1).encode())
    close_to_others(folder / MANIFEST)
    sync(folder)


def _entry_of(parts: Sequence[FileFacts]) -> dict[str, Any]:
    """Return the facts on a file for a manifest, from those on its parts."""
    if len(parts) == 1:
        return asdict(parts[0])
    return {"size": sum(part.size for part in parts), "parts": list(map(astuple, parts))}


def check_space(folder: Path, size: int, files: int) -> None:
    """Raise OSError (ENOSPC) where a folder's file system lacks room for `size` bytes or `files`
    files; any other OSError if it can't be asked.

    A total that the file system reports as 0 is not checked.
    """
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if space.f_blocks and free < size:  # some file systems report no sizes at all
        raise OSError(
            errno.ENOSPC, f"No space left for {size / 1e6:.1f} MB: {free / 1e6:.1f} MB are free"
        )
    if space.f_files and space.f_favail < files:
        raise OSError(errno.ENOSPC, f"No space left for {files} files: {space.f_favail} inodes")


def draft(folder: Path, step: int, attempt: int) -> Path:
    """Return the folder into which an attempt writes the checkpoint of a step; it is not made."""
    return folder / f"step-{step}.tmp-{attempt}"


def publish(draft_folder: Path, attempt: int) -> Path:
    """Give a complete draft its final name, durably, and return its path.

    A folder that has the name already is moved aside, never written into. It is `.old-` when it
    verifies: the same step before and after the code at the end of an epoch; else `.bad-`. Raise
    OSError if a rename fails, or the sync after it, when the draft has its final name already.
    """
    final = draft_folder.with_name(f"step-{step_of(draft_folder)}")
    if final.exists():
        set_aside(final, "bad" if verify(final) else "old", attempt)
    draft_folder.rename(final)
    sync(final.parent)
    return final


def set_aside(folder: Path, kind: str, attempt: int) -> Path:
    """Rename a checkpoint to ``step-<n>.<kind>-<attempt>`` and return the new path.

    `kind` is ``old``, which replaces one of that name, or ``bad``, which gets a further number
    where the name is taken.
    Raise OSError if the rename fails.
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
    """Remove what earlier attempts, or this one's workers before a restart, left half-written.

    It raises nothing: what can't be listed or removed stays for the next start.
    """
    with suppress(OSError):
        for path in folder.glob("step-*.tmp-*"):
            remove(path)


def remove(path: Path) -> None:
    """Remove a folder, also while another process removes it, or where there is none.

    It loses its name first, since a kill may come in between: half a checkpoint is none. It raises
    nothing: a folder that can't be renamed stays as it is, and a file that can't be removed, as NFS
    keeps one while a process has it open, stays in ``step-<n>.tmp-gone``.
    """
    nameless = path.with_name(f"{path.name.partition('.')[0]}.tmp-gone")
    with suppress(OSError):
        shutil.rmtree(nameless, ignore_errors=True)
        path.rename(nameless)
    shutil.rmtree(nameless, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder; raise OSError if the disk refuses."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
