"""Containers: the command line of each tool, as data in ``templates/containers``."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_ddp.core.errors import UsageError, closest
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.submission.package_files import folder
from hpc_ddp.submission.settings.trust import read_toml

DEFAULT_TOOL = "apptainer"
_LISTS = ("--container-mounts", "--container-env")  # options of pyxis, whose values are lists


@dataclass(frozen=True)
class Entry:
    """How a job's processes enter their container. `command` has the words that stand before the
    job's command on each node; `srun` and `sbatch` have raw options, ``--name=value``, of srun and
    sbatch. All are empty for a job without a container."""

    command: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()


def make_entry(spec: JobSpec, run: Path, code: Path) -> Entry:
    """Return how the processes of a job enter its container; an empty entry for a job without one.

    ``container`` is the whole command, split as by a shell. For an ``image`` the file of
    ``container-tool`` is filled in: with the user's options, with the tool's own options for GPUs
    (`_gpu_options`), and with mounts of the folders `run` and `code` (not for a command) and of the
    working directory, under their own paths (see `_mounts`).

    Raises
    ------
    UsageError
        there is no such tool, or its file is broken; a path to mount has a comma or colon, which
        would cut a list of mounts
    """
    if not spec.image:
        return Entry(command=tuple(shlex.split(spec.container or "")))
    tool = read_toml(_file_of_tool(spec.container_tool or DEFAULT_TOOL))
    # The folder of a command is the image's, as /opt/conda/bin: the host's would hide it.
    paths = (run, Path(spec.chdir)) if spec.no_python else (run, code, Path(spec.chdir))
    folders = list(_mounts([*dict.fromkeys(map(str, paths))]))
    if bad := next((folder for folder in folders if set(folder) & set(",:")), None):
        raise UsageError(
            f"the folder {bad!r} can't be mounted: its name has a comma or a colon",
            hint="rename it, or say the whole command: --container 'apptainer exec …'",
        )
    texts = {"image": spec.image, "workdir": spec.chdir}
    lists = {"{gpu}": _gpu_options(spec, tool), "{options}": [*spec.container_options]}
    mount = tool.get("mount", "")
    if isinstance(mount, list):  # the words of an option for each folder
        lists["{mounts}"] = [word.format(path=path) for path in folders for word in mount]
    else:  # a part of one option for all folders
        texts["mounts"] = ",".join(mount.format(path=path) for path in folders)
    options = {option.partition("=")[0] for option in (*spec.container_options, *spec.srun)}
    parts = (tool.get(part, []) for part in ("command", "srun", "sbatch"))
    command, srun, sbatch = (tuple(_fill_words(part, texts, lists, options)) for part in parts)
    return Entry(command, join_lists(srun), sbatch)


def join_lists(words: Sequence[str]) -> tuple[str, ...]:
    """Return options of srun, ``--name=value``, with one option in place of several of `_LISTS`.

    pyxis adds their values up in srun alone: Slurm passes the last one of each on to the nodes.
    """
    joined: list[str] = []
    for word in words:
        name, _, text = word.partition("=")
        places = [i for i, w in enumerate(joined) if name in _LISTS and w.startswith(f"{name}=")]
        if places and text:
            joined[places[0]] += f",{text}"
        else:
            joined.append(word)
    return tuple(joined)


def _gpu_options(spec: JobSpec, tool: Mapping[str, Any]) -> list[str]:
    """Return a tool's own options for the vendor of the job's GPUs; [] for a job without GPUs, and
    where the user sets such an option. `tool` is the content of the tool's file."""
    if not spec.gpu_count or {*spec.container_options} & {*tool.get("gpu_or", [])}:
        return []
    # AMD's names of types, as mi250.
    is_amd = spec.gpu_vendor == "amd" or re.match(r"mi\d", spec.gpu_type or "", re.I)
    options: list[str] = tool.get("gpu-amd" if is_amd and "gpu-amd" in tool else "gpu", [])
    return options


def _fill_words(
    words: Sequence[str],
    texts: Mapping[str, str],
    lists: Mapping[str, Sequence[str]],
    user_options: Set[str],
) -> Iterator[str]:
    """Yield the words of a tool's file, filled in. A word that is a key of `lists` (``{gpu}``)
    becomes the list's words; a field inside a word (``--pwd={workdir}``) becomes its text of
    `texts`. The tool's option for the working directory is left out where it is among the names of
    the `user_options`."""
    for word in words:
        if word in lists:
            yield from lists[word]
        elif not (word.endswith("={workdir}") and word.partition("=")[0] in user_options):
            yield word.format(**texts)


def _mounts(paths: Sequence[str]) -> Iterator[str]:
    """Yield the folders to mount, so that all of `paths` can be reached. A folder below another of
    `paths` needs no mount of its own; but where its real path lies in none of the folders above it,
    as behind a link, the real path is yielded."""
    for path in paths:
        parents = [parent for parent in paths if Path(parent) in Path(path).parents]
        target = Path(os.path.realpath(path))
        if not parents:
            yield path
        elif not any(Path(os.path.realpath(parent)) in target.parents for parent in parents):
            yield str(target)


def _file_of_tool(tool: str) -> Path:
    """Return the file of a container tool. Raise UsageError for an unknown tool; the message names
    the known ones."""
    files = {path.stem: path for path in (folder("templates") / "containers").glob("*.toml")}
    if tool not in files:
        raise UsageError(
            f"container-tool {tool!r} is unknown; accepted: {', '.join(sorted(files))}"
            + closest(tool, sorted(files)),
            hint="in its place, the whole command: --container 'TOOL run image'",
        )
    return files[tool]
