"""A run's checkpoints as a reader sees them: which there are, and whether they can be trusted.

::

    checkpoints/step-<n>/manifest.json       each file's size and CRC32; written last
    checkpoints/step-<n>/state.pt            what is no tensor, and the tensors' places
    checkpoints/step-<n>/rank-<r>.pt         rank r's generators, and what its data file holds
    checkpoints/step-<n>/tensors-<r>.bin     rank r's part of the tensors, as raw bytes
    checkpoints/step-<n>.tmp-<attempt>/      being written; worth nothing
    checkpoints/step-<n>.old-<attempt>/      on its way out: the same step, saved once more
    checkpoints/step-<n>.bad-<attempt>/      did not verify; kept for a person to look at

Standard library only, so that a login node without torch can verify them.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_ddp.run.progress import Progress

MANIFEST = "manifest.json"
FORMAT = 2  # of what is in the files; another one can't be read
CHUNK = 4 << 20  # bytes; big enough that summing and writing run outside the interpreter lock

_STEP = re.compile(r"step-(\d+)(\.old-\d+)?")
_ANY = re.compile(r"step-\d+(\.(old|bad|tmp)-[\w-]+)?")
_SHOWN = re.compile(r"step-(\d+)(\.(old|bad)-[\d-]+)?")


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says of a file: `size` in bytes, and its CRC32."""

    size: int
    crc32: int


def manifest_crc(value: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; raises OSError or ValueError where it can't be believed."""
    value = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(value, dict) or value.pop("crc32", None) != manifest_crc(value):
        raise ValueError("its own CRC32 differs")
    return value


def _unheard(size: int) -> None: ...


def verify(
    folder: Path, rank: int = 0, world_size: int = 1, read: Callable[[int], None] = _unheard
) -> str | None:
    """Return why a checkpoint can't be trusted, or None when every byte is as it was written.

    Ranks can share the work: each looks at the manifest, and at its part of the files. `read` is
    told how many bytes were read, again and again.
    """
    try:
        files = read_manifest(folder)["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST} can't be read: {error}"
    for name, said in list(files.items())[rank::world_size]:
        try:
            found = facts_of(folder / name, read)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} can't be read: {error}"
        if found.size != said["size"]:
            return f"{name} has {found.size} bytes instead of {said['size']}"
        if found.crc32 != said["crc32"]:
            return f"{name} has been damaged: its CRC32 differs"
    return None


def facts_of(path: Path, read: Callable[[int], None] = _unheard) -> FileFacts:
    """Read a file through; raises OSError."""
    size = crc32 = 0
    chunk = memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            size += count
            crc32 = zlib.crc32(chunk[:count], crc32)
            read(count)
    return FileFacts(size, crc32)


def candidates(folder: Path) -> list[Path]:
    """Return what may be a checkpoint, newest first; at the same step `.old-` comes second."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _STEP.fullmatch(path.name):
            found.append((int(match[1]), match[2] is None, path))
    return [path for *_, path in sorted(found, reverse=True)]


def published(folder: Path) -> list[Path]:
    """Return the checkpoints that have their final name, newest first."""
    return [path for path in candidates(folder) if "." not in path.name]


def all_of(folder: Path) -> list[Path]:
    """Return all checkpoints, also those that are half-written, damaged or on their way out."""
    found = folder.glob("step-*") if folder.is_dir() else ()
    return sorted(path for path in found if _ANY.fullmatch(path.name) and path.is_dir())


def step_of(folder: Path) -> int:
    """Return the step that a folder named ``step-<n>…`` is of."""
    return int(folder.name.removeprefix("step-").partition(".")[0])


@dataclass(frozen=True)
class Health:
    """One checkpoint of a list. `bytes` is None where the manifest can't be read, `age_s` is in
    seconds, `problem` None for a good one, `best` marks the one with the best value so far."""

    name: str
    age_s: float
    bytes: int | None
    world_size: int | None
    best: bool
    problem: str | None


def health(folder: Path) -> list[Health]:
    """Verify all checkpoints in a run's folder of checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if _SHOWN.fullmatch(path.name)]
    found.sort(key=lambda path: (step_of(path), path.name))
    with Progress("reading the checkpoints", sum(map(_size, found))) as progress:
        rows = [_health(path, progress.add) for path in found]
    marked = [row.name for row in rows if row.best]
    return [replace(row, best=row.name == marked[-1]) if row.best else row for row in rows]


def _size(folder: Path) -> int:
    with suppress(OSError):  # deleted meanwhile
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


def _health(path: Path, read: Callable[[int], None]) -> Health:
    problem = verify(path, read=read)
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError):
        manifest = {}
    sizes = [each["size"] for each in manifest.get("files", {}).values()]
    return Health(
        name=path.name,
        age_s=time.time() - path.stat().st_mtime,
        bytes=sum(sizes) if sizes else None,
        world_size=manifest.get("world_size"),
        best=(manifest.get("best") or {}).get("step") == step_of(path),
        problem=problem,
    )
