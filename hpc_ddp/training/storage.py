"""Checkpoints as files: write, verify, publish, prune. Knows nothing of ranks or models.

::

    checkpoints/step-<n>/manifest.json, state.pt, rng-<rank>.pt
    checkpoints/step-<n>.tmp-<attempt>/      being written; worth nothing
    checkpoints/step-<n>.old-<attempt>/      on its way out, see `publish`
    checkpoints/step-<n>.bad-<attempt>/      did not verify; kept for a person to look at
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "manifest.json"
CHUNK = 4 << 20

_STEP = re.compile(r"step-(\d+)(\.old-\d+)?")


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says of a file: `size` in bytes, and its CRC32."""

    size: int
    crc32: int


class ChecksummedFile:
    """A binary file for writing that counts and sums what passes through.

    The first OSError is kept for `close` and the rest of the data is thrown away, because
    torch.save, written in C++, turns an error inside `write` into one of its own that hides
    the cause.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: OSError | None = None
        self._size = self._crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._file.write(view)
            except OSError as error:
                self._error = error
        self._size += len(view)
        self._crc32 = zlib.crc32(view, self._crc32)
        return len(view)

    def flush(self) -> None:
        """Wait for `close`, which also syncs."""

    def close(self) -> FileFacts:
        """Make the file durable; raises the OSError that writing it met, if any."""
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileFacts(self._size, self._crc32)


def write_file(path: Path, fill: Callable[[Any], object]) -> FileFacts:
    """Create a file, let `fill` write into a file object, and make it durable; raises OSError."""
    with open(path, "wb", buffering=0) as raw:
        file = ChecksummedFile(raw)
        fill(file)
        return file.close()


def write_manifest(folder: Path, facts: dict[str, Any], files: dict[str, FileFacts]) -> None:
    """Write the manifest, which makes the folder a checkpoint, and make both durable."""
    value = {**facts, "files": {name: asdict(each) for name, each in sorted(files.items())}}
    value["crc32"] = _crc_of(value)
    write_file(folder / MANIFEST, lambda file: file.write(json.dumps(value, indent=1).encode()))
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; raises OSError or ValueError where it can't be believed."""
    value = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(value, dict) or value.pop("crc32", None) != _crc_of(value):
        raise ValueError("its own CRC32 differs")
    return value


def _crc_of(value: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def verify(folder: Path) -> str | None:
    """Return why a checkpoint can't be trusted, or None when every byte is as it was written."""
    try:
        files = read_manifest(folder)["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST} can't be read: {error}"
    for name, said in files.items():
        try:
            found = _facts_of(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} can't be read: {error}"
        if found.size != said["size"]:
            return f"{name} has {found.size} bytes instead of {said['size']}"
        if found.crc32 != said["crc32"]:
            return f"{name} has been damaged: its CRC32 differs"
    return None


def _facts_of(path: Path) -> FileFacts:
    size = crc32 = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileFacts(size, crc32)


def candidates(folder: Path) -> list[Path]:
    """Return what may be a checkpoint, newest first; at the same step `.old-` comes second."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _STEP.fullmatch(path.name):
            found.append((int(match[1]), match[2] is None, path))
    return [path for *_, path in sorted(found, reverse=True)]


def step_of(folder: Path) -> int:
    """Return the step that a folder named ``step-<n>…`` is of."""
    return int(folder.name.removeprefix("step-").partition(".")[0])


def draft(folder: Path, step: int, attempt: int) -> Path:
    return folder / f"step-{step}.tmp-{attempt}"


def publish(made: Path, attempt: int) -> Path:
    """Give a complete draft its final name, durably, and return its path.

    A folder that has the name already is moved aside, never written into. It is `.old-`
    when it verifies: the same step before and after the code at the end of an epoch.
    """
    final = made.with_name(f"step-{step_of(made)}")
    if final.exists():
        set_aside(final, "bad" if verify(final) else "old", attempt)
    made.rename(final)
    sync_folder(final.parent)
    return final


def set_aside(folder: Path, kind: str, attempt: int) -> Path:
    """Rename a checkpoint to ``step-<n>.<kind>-<attempt>`` and return the new path."""
    stem = f"step-{step_of(folder)}.{kind}-{attempt}"
    path = folder.with_name(stem)
    if kind == "old":
        remove(path)
    tries = 0
    while path.exists():
        tries += 1
        path = folder.with_name(f"{stem}-{tries}")
    return folder.rename(path)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; call it after a newer one is durable."""
    published = [path for path in candidates(folder) if "." not in path.name]
    kept = set(published[:keep])
    for path in candidates(folder):
        if path not in kept:
            remove(path)


def clear_drafts(folder: Path, attempt: int) -> None:
    """Remove what earlier attempts left half-written."""
    for path in folder.glob("step-*.tmp-*"):
        if not path.name.endswith(f".tmp-{attempt}"):
            remove(path)


def remove(path: Path) -> None:
    """Remove a folder, whoever else removes it at the same time.

    What can't be removed (a file that NFS keeps while somebody has it open) is left lying.
    """
    shutil.rmtree(path, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
