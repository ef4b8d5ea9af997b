"""Containers: the command line of each tool, as data in ``templates/containers``."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_ddp.core.errors import UsageError, closest
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.submission.package_files import folder
from hpc_ddp.submission.settings.trust import read_toml

DEFAULT_TOOL = "apptainer"


@dataclass(frozen=True)
class Entry:
    """How a job's processes enter their container. `command` has the words before the command on
    each node; `srun` and `sbatch` have raw options of srun and sbatch. All are empty for a job
    without a container."""

    command: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()


def entry(spec: JobSpec, run: Path, code: Path) -> Entry:
    """Return how the processes of `spec` enter the container that it names; an empty entry where it
    names none.

    ``container`` is the whole command, split as by a shell. For an ``image`` the file of
    ``container-tool`` is filled in: with the user's options; with the tool's own options for GPUs,
    where the job has GPUs and the user names no such option; and with mounts of the folders `run`
    and `code` and of the working directory, under their own paths (see `_mounts`).

    Raises
    ------
    UsageError
        there is no such tool, or its file is broken; a path to mount has a comma or colon, which
        would cut a list of mounts
    """
    if not spec.image:
        return Entry(command=tuple(shlex.split(spec.container or "")))
    data = read_toml(_file(spec.container_tool or DEFAULT_TOOL))
    paths = list(dict.fromkeys(str(path) for path in (run, code, Path(spec.chdir))))
    outer = list(_mounts(paths))
    if bad := next((path for path in outer if set(path) & set(",:")), None):
        raise UsageError(
            f"the folder {bad!r} can't be mounted: its name has a comma or a colon",
            hint="rename it, or say the whole command: --container 'apptainer exec …'",
        )
    values, options = {"image": spec.image, "workdir": spec.chdir}, list(spec.container_options)
    is_amd = spec.gpu_vendor == "amd" or re.match(r"mi\d", spec.gpu_type or "", re.I)
    gpu = data.get("gpu-amd" if is_amd and "gpu-amd" in data else "gpu", [])
    has_gpu_option = not spec.gpu_count or {*options} & {*data.get("gpu_or", [])}
    lists = {"{gpu}": [] if has_gpu_option else gpu, "{options}": options}
    mount = data.get("mount", "")
    if isinstance(mount, list):  # an option for each
        lists["{mounts}"] = [word.format(path=path) for path in outer for word in mount]
    else:
        values["mounts"] = ",".join(mount.format(path=path) for path in outer)

    names = [option.partition("=")[0] for option in (*options, *spec.srun)]

    def filled(words: list[str]) -> tuple[str, ...]:
        """Return the `words` of a tool's file with their fields filled in. A word that stands for a
        list becomes the list's words. The tool's option for the working directory is left out where
        the user sets the same option."""
        filled_in: list[str] = []
        for word in words:
            if word in lists:
                filled_in += lists[word]
            elif not (word.endswith("={workdir}") and word.partition("=")[0] in names):
                filled_in.append(word.format(**values))
        return tuple(filled_in)

    return Entry(*(filled(data.get(part, [])) for part in ("command", "srun", "sbatch")))


def _mounts(paths: Sequence[str]) -> Iterator[str]:
    """Yield the folders to mount, so that all of `paths` can be reached. A folder below another one
    needs no mount of its own; where a link on its path leads out of the other folders, the link's
    target is yielded."""
    for path in paths:
        above = [parent for parent in paths if Path(parent) in Path(path).parents]
        target = Path(os.path.realpath(path))
        if not above:
            yield path
        elif not any(Path(os.path.realpath(parent)) in target.parents for parent in above):
            yield str(target)


def _file(tool: str) -> Path:
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
