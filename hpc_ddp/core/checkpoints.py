"""Reads a run's checkpoints: which there are, and whether they can be trusted.

::

    checkpoints/step-<n>/manifest.json       each file's size and CRC32; written last
    checkpoints/step-<n>/state.pt            what is no tensor, and the tensors' places
    checkpoints/step-<n>/rank-<r>.bin        the parts of rank r and of its neighbours on the node
    checkpoints/step-<n>/frozen-<r>.bin      rank r's part of the weights that are not trained
    checkpoints/step-<n>/…                   in place of these three: files of another library
    checkpoints/step-<n>.tmp-<attempt>/      being written; worth nothing
    checkpoints/step-<n>.old-<attempt>/      on its way out: the same step, saved once more
    checkpoints/step-<n>.bad-<attempt>/      did not verify; kept for a person to look at
    checkpoints/aside-<n>/                   all that ``--fresh`` has moved out of the way

Standard library only, so that a login node without torch can verify them.
"""

from __future__ import annotations

import errno
import json
import operator
import os
import re
import shlex
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_ddp.core.console.progress import ProgressBar
from hpc_ddp.core.file_io import list_names, open_data, parse_object, read_json, read_text
from hpc_ddp.core.journal.events import CheckpointSaved, Fresh
from hpc_ddp.core.journal.fields import checked
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder

MANIFEST = "manifest.json"
FORMAT = 4  # of what is in the files; another one can't be read
CHUNK_BYTES = 4 << 20  # bytes; big enough that summing and writing run outside the interpreter lock

# What opening a folder, a pipe, a device or a socket gives.
_NO_FILE = (errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENXIO)

_STEP = re.compile(r"step-(\d+)(\.old-\d+)?")  # names of what may be good
_ANY = re.compile(r"step-\d+(\.(old|bad|tmp)-[\w-]+)?")
_SHOWN = re.compile(r"step-(\d+)(\.(old|bad)-[\d-]+)?")  # whole ones


@dataclass(frozen=True)
class FileFacts:
    """The size in bytes and the CRC32 of a file in a manifest, or of the part of a file that one
    process has written."""

    size: int
    crc32: int


def manifest_crc(value: dict[str, Any]) -> int:
    """Return the CRC32 of a manifest, the JSON object `value`, without its key ``crc32``."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, without its CRC32.

    Its ``files`` has an entry for each file, by the path below the folder: ``size`` and ``crc32``
    (see `FileFacts`), or, for a file that several processes have written, ``size`` and ``parts``,
    the [size, CRC32] of each part in order. Its ``best``, if any, has a ``step``.

    Raises
    ------
    OSError
        the manifest can't be read
    ValueError
        the manifest is damaged, or names a file outside the folder
    """
    value = parse_object(read_text(folder / MANIFEST))
    if value.pop("crc32", None) != manifest_crc(value):
        raise ValueError("its own CRC32 differs")
    _check_entry(value, "files", "Mapping[str]")
    for name, facts in value["files"].items():
        if set(name.split("/")) & {"", ".", ".."} or "\0" in name:
            raise ValueError(f"{name!r} is no name of a file in its folder")
        _check_entry(value["files"], name, "Mapping[str]")
        _check_entry(facts, "size", "int")
        _parts_of(facts)  # raises where they are damaged
    if value.get("world_size") is not None:
        _check_entry(value, "world_size", "int")
    if value.get("best") is not None:
        _check_entry(value, "best", "Mapping[str]")
        _check_entry(value["best"], "step", "int")
    return value


def _parts_of(facts: Mapping[str, Any]) -> list[FileFacts]:
    """Return size and CRC32 of each part of a file, in order, from `facts`, the file's entry in a
    manifest; a file that one process has written is one part. Raise ValueError where the entry is
    damaged."""
    if "parts" not in facts:
        _check_entry(facts, "crc32", "int")
        return [FileFacts(facts["size"], facts["crc32"])]
    try:
        parts = [FileFacts(*map(operator.index, pair)) for pair in facts["parts"]]
    except TypeError:
        raise ValueError("its 'parts' are damaged") from None
    if sum(part.size for part in parts) != facts["size"]:
        raise ValueError("its 'parts' are not as large as their file")
    return parts


def _check_entry(table: Mapping[str, Any], key: str, type_name: str) -> None:
    """Raise ValueError where a manifest's table has no entry `key`, or one that is not of the type
    `type_name`, which `fields.checked` knows, as ``int``."""
    try:
        checked(table.get(key), type_name)
    except ValueError:
        raise ValueError(f"its {key!r} is damaged") from None


def _ignore(size: int) -> None:
    """Do nothing with the number of bytes of a chunk."""


def verify(
    folder: Path, rank: int = 0, world_size: int = 1, count_bytes: Callable[[int], None] = _ignore
) -> str | None:
    """Return why a checkpoint can't be trusted, None where every byte is as it was written. An
    error of the disk is such a reason, too. The other parameters are those of `find_damage`."""
    try:
        return find_damage(folder, rank, world_size, count_bytes)
    except OSError as error:
        return error.strerror or str(error)


def find_damage(
    folder: Path, rank: int = 0, world_size: int = 1, count_bytes: Callable[[int], None] = _ignore
) -> str | None:
    """Return the first missing or damaged file of a checkpoint in words, None where every byte is
    as it was written.

    Ranks can share the work: each reads the manifest, and every `world_size`-th part of its files
    from part number `rank` on; None then holds for these parts. `count_bytes` is called after each
    chunk that was read, with the number of its bytes.

    Raises
    ------
    OSError
        a file can't be read, and may be there all the same: the disk does not answer, say
    """
    try:
        files = read_manifest(folder)["files"]
    except OSError as error:
        return _describe_missing(folder, folder / MANIFEST, error)
    except ValueError as error:
        return f"{MANIFEST} can't be read: {error}"
    for name, offset, part in list(_all_parts(files))[rank::world_size]:  # this rank's share
        path, size = folder / name, files[name]["size"]
        try:
            # The last part is read to the file's end: more bytes than written are damage.
            limit = part.size if offset + part.size < size else None
            facts = facts_of(path, count_bytes, offset, limit)
        except OSError as error:
            return _describe_missing(folder, path, error)
        if facts.size != part.size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if facts.crc32 != part.crc32:
            return f"{name} has been damaged: its CRC32 differs"
    return None


def _all_parts(files: Mapping[str, Any]) -> Iterator[tuple[str, int, FileFacts]]:
    """Yield, for each part of the files in `files` of a manifest, the file's name, the byte at
    which the part begins, and the part's size and CRC32.

    Files come by name, with numbers in names as numbers: so part n is mostly that of rank n, which
    reads the same part again at a restore.
    """
    for name, facts in sorted(files.items(), key=lambda pair: _natural_key(pair[0])):
        offset = 0
        for part in _parts_of(facts):
            yield name, offset, part
            offset += part.size


def _natural_key(name: str) -> list[tuple[str, int]]:
    """Return a key by which ``rank-10`` comes after ``rank-9``: [("rank-", 10), ("", 0)]."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _describe_missing(folder: Path, path: Path, error: OSError) -> str:
    """Return what is wrong where a folder lacks the file `path`, or has something else in its
    place, such as a pipe or a link to nowhere. `error` is what reading the file has raised. Raise
    OSError where `error` proves neither: a link of another user further up, say, says nothing of
    the file."""
    name = path.relative_to(folder)
    is_link = path.is_symlink() or path.parent.is_symlink()
    if error.errno in _NO_FILE or (error.errno in (errno.ENOENT, errno.ELOOP) and is_link):
        return f"{name} is no file: {error.strerror}"
    absent = path  # or the highest of the folders in `folder` that is missing
    while absent.parent != folder and not os.path.lexists(absent.parent):
        absent = absent.parent
    # By listing: a look-up of a name may be answered from an NFS cache.
    if isinstance(error, FileNotFoundError) and absent.name not in os.listdir(absent.parent):
        return f"{name} is missing"
    reason = f"{name} can't be read: {error.strerror or error}"
    raise OSError(error.errno, reason) from error


def facts_of(
    path: Path,
    count_bytes: Callable[[int], None] = _ignore,
    offset: int = 0,
    limit: int | None = None,
) -> FileFacts:
    """Read a file from byte `offset` on, `limit` bytes at most (None: to its end), and return size
    and CRC32 of what was read. `count_bytes` gets the number of bytes of each chunk. Raise OSError
    where it can't be read, is no regular file, or lies behind a link of another user."""
    size = crc32 = 0
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with open_data(path) as file:
        file.seek(offset)
        # A slice ends with the buffer at the latest.
        while count := file.readinto(chunk[: CHUNK_BYTES if limit is None else limit - size]):
            size += count
            crc32 = zlib.crc32(chunk[:count], crc32)
            count_bytes(count)
    return FileFacts(size, crc32)


def candidates(folder: Path) -> list[Path]:
    """Return the folders in a folder that may be checkpoints by their names, newest first; at the
    same step `.old-` comes second. None is verified. [] for a folder that does not exist; raise
    OSError where it can't be listed."""
    matches = filter(None, map(_STEP.fullmatch, list_names(folder)))
    ranked = [(int(match[1]), match[2] is None, folder / match[0]) for match in matches]
    return [path for *_, path in sorted(ranked, reverse=True)]


def published(folder: Path) -> list[Path]:
    """Return the checkpoints that have their final name, ``step-<n>``, newest first; none is
    verified. [] for a folder that does not exist; raise OSError where it can't be listed."""
    return [path for path in candidates(folder) if "." not in path.name]


def milestones(newest_first: Sequence[Path], every: int | None) -> set[Path]:
    """Return the oldest checkpoint of each stretch of `every` steps (0 to `every` - 1, and so on)
    among `newest_first`, which `published` has returned; an empty set where `every` is None."""
    # Of paths with the same key the last one stays, which is the oldest.
    firsts = {step_of(path) // every: path for path in newest_first} if every else {}
    return set(firsts.values())


def all_of(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints, by name, also of those that are half-written, damaged
    or on their way out; [] for a folder that does not exist. Raise OSError where it can't be
    listed."""
    paths = (folder / name for name in list_names(folder) if _ANY.fullmatch(name))
    return sorted(path for path in paths if path.is_dir())


def set_aside(run: RunFolder) -> Path | None:
    """Move all checkpoints of an idle run into a new folder ``aside-<n>``, so that its next attempt
    begins at step 0; return this folder, None if there were no checkpoints.

    The journal notes it in both cases, since without a note an attempt refuses to begin a run that
    has had checkpoints (see `describe_lost`). A disk that refuses the note is reported on stderr.
    Raise OSError where the disk refuses a move; some checkpoints may have been moved by then, and
    nothing is noted.
    """
    folders, number = all_of(run.checkpoints), 0
    while (aside := run.checkpoints / f"aside-{number}").exists():
        number += 1
    for folder in folders:
        aside.mkdir(mode=0o755, exist_ok=True)
        folder.rename(aside / folder.name)
    run.journal("submit").write_surely(Fresh(run.next_attempt()))
    return aside if folders else None


def bring_back(run: RunFolder, aside: Path) -> None:
    """Move the checkpoints back that `set_aside` has moved to the folder `aside`, and remove this
    folder. The note in the journal stays.

    Raise OSError where the disk refuses a move, or `aside` holds something else; some checkpoints
    may have been moved by then.
    """
    for folder in all_of(aside):
        folder.rename(run.checkpoints / folder.name)
    aside.rmdir()


def describe_lost(run: RunFolder) -> list[str]:
    """Return descriptions, as ``name: problem``, of the checkpoints that a run has lost; the run
    has no candidate any more. These are the damaged ones that are still there, or without any the
    last one that the journal calls saved.

    [] for a run that never had a checkpoint, or has had none since `set_aside`. Raise OSError where
    the run's checkpoints can't be listed, or its journal can't be read.
    """
    bad = [path.name for path in all_of(run.checkpoints) if ".bad-" in path.name]
    if bad:
        return [f"{name}: it was found damaged by an earlier attempt" for name in bad]
    events = run.events()
    fresh, saved = last_event(events, Fresh), last_event(events, CheckpointSaved)
    if saved is None or (fresh and saved.attempt < fresh.first_attempt):
        return []
    return [f"step-{saved.step}: it was saved, and is gone"]


def fresh_command(run: RunFolder) -> str:
    """Return the shell command that lets a run begin at step 0 again and keeps its checkpoints. For
    a run that was started without hpc-ddp it moves the run's folder away."""
    path = shlex.quote(str(run.path))
    array = RunFolder(run.whole)
    if not array.lib.exists():  # not started by hpc-ddp
        return f"mv {path} {path}-old"
    command = "dry-run" if read_json(array.job_json).get("backend") == "local" else "submit"
    return f"hpc-ddp {command} --run {path} --fresh"


def step_of(folder: Path) -> int:
    """Return the step n of a checkpoint's folder, ``step-<n>…``; raise ValueError for another
    name."""
    return int(folder.name.removeprefix("step-").partition(".")[0])


@dataclass(frozen=True)
class Health:
    """The state of one checkpoint. `bytes` and `world_size` are None where the manifest does not
    have them or can't be read, `age_s` is in seconds, `problem` is None for a good checkpoint, and
    `best` marks the checkpoint with the best value so far."""

    name: str
    age_s: float
    bytes: int | None
    world_size: int | None
    best: bool
    problem: str | None


def verify_all(folder: Path) -> list[Health]:
    """Verify all checkpoints in a run's folder of checkpoints; return a row for each, oldest first.

    A half-written one has no row. One that is damaged, or can't be read, has a `problem`. [] for a
    folder that does not exist; raise OSError where it can't be listed. On a terminal a bar on
    stderr shows the progress.
    """
    paths = [folder / name for name in list_names(folder) if _SHOWN.fullmatch(name)]
    paths.sort(key=lambda path: (step_of(path), path.name))
    with ProgressBar("reading the checkpoints", sum(map(_size, paths))) as progress:
        rows = [_verify_one(path, progress.add) for path in paths]
    marked = [row.name for row in rows if row.best]  # each was the best when saved: the last one is
    return [replace(row, best=row.name == marked[-1]) if row.best else row for row in rows]


def _size(folder: Path) -> int:
    """Return the bytes of the files in a checkpoint; 0 where one can't be read, or was deleted
    meanwhile."""
    with suppress(OSError):  # deleted meanwhile
        return sum(path.stat().st_size for path in folder.rglob("*"))
    return 0


def _verify_one(path: Path, count_bytes: Callable[[int], None]) -> Health:
    """Verify one checkpoint and return its row; a checkpoint that can't be read has a problem.
    `count_bytes` gets the number of bytes of each chunk. `best` of the row says that the checkpoint
    was the best one when saved."""
    problem = verify(path, count_bytes=count_bytes)
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError):
        manifest = {}
    sizes = [facts["size"] for facts in manifest.get("files", {}).values()]
    saved_at = time.time()
    with suppress(OSError):  # deleted meanwhile
        saved_at = path.lstat().st_mtime
    return Health(
        name=path.name,
        age_s=time.time() - saved_at,
        bytes=sum(sizes) if sizes else None,
        world_size=manifest.get("world_size"),
        best=(manifest.get("best") or {}).get("step") == step_of(path),
        problem=problem,
    )
