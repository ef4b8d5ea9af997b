"""From options, ``hpc-ddp.toml``, site files and defaults to one `JobSpec`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from hpc_ddp.launch.fabric import read_toml
from hpc_ddp.launch.resources import folder
from hpc_ddp.run.errors import UsageError, closest
from hpc_ddp.run.spec import JobSpec

PROJECT_FILE = "hpc-ddp.toml"
OURS = ("site", "runs-dir", "scratch", "chdir", "snapshot", "snapshot-exclude", "job-name")
_LISTS = (
    *("args", "sbatch", "srun", "torchrun", "setup", "teardown", "env-names"),
    *("container-options", "snapshot-exclude"),
)
_NUMBERS = ("nproc-per-node", "cpus-per-task", "max-requeues", "max-failures", "max-restarts")
_BOUNDS = ("budget-gpu-hours",)
_FLAGS = ("exclusive", "snapshot", "preflight", "elastic")


def known_keys() -> list[str]:
    """Return the keys that a project or site file may have: the options' own names."""
    no_keys = ("name", "sweep", "workdir")
    names = [f.name.replace("_", "-") for f in fields(JobSpec) if f.name not in no_keys]
    return sorted([*names, *OURS])


@dataclass(frozen=True)
class Settings:
    """Merged values, by key."""

    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)


def find_project_file(start: Path) -> Path | None:
    """Return the nearest ``hpc-ddp.toml``, from `start` upwards."""
    return next(
        (p / PROJECT_FILE for p in (start, *start.parents) if (p / PROJECT_FILE).is_file()), None
    )


def load(options: Mapping[str, Any], cwd: Path, home: Path) -> Settings:
    """Merge all layers; the first that has a key wins: option, project, own site file, profile.

    `env` is merged name by name; all other values are taken whole.

    Raises
    ------
    UsageError
        a file has an unknown key, a value of the wrong kind, or there is no such site
    """
    layers = [options]
    project = find_project_file(cwd)
    if project:
        layer = _read_layer(project)
        if "script" in layer:  # a path in a file is meant from there
            layer["script"] = str(project.parent / layer["script"])
        layers.append(layer)
    site = next((layer["site"] for layer in layers if layer.get("site")), None)
    layers += _site_layers(site, home)
    values: dict[str, Any] = {}
    for each in reversed(layers):
        for key, value in each.items():
            values[key] = {**values.get(key, {}), **value} if key == "env" else value
    return Settings(values)


def _site_layers(site: str | None, home: Path) -> list[Mapping[str, Any]]:
    """Return the layers of a site: the user's own file, then the shipped profile.

    Without a name the user's ``site.toml`` is the site, where there is one.
    """
    own = home / ".config" / "hpc-ddp" / f"{site or 'site'}.toml"
    shipped = folder("templates") / "sites" / f"{site or 'generic'}.toml"
    paths = [path for path in (own, shipped) if path.is_file()]
    if site and not paths:
        known = sorted(p.stem for f in (own, shipped) for p in f.parent.glob("*.toml"))
        raise UsageError(
            f"site {site!r} is unknown; accepted: {', '.join(known)}{closest(site, known)}",
            hint=f"describe it in {own}",
        )
    return [_read_layer(path) for path in paths]


def _read_layer(path: Path) -> dict[str, Any]:
    layer, known = read_toml(path), known_keys()
    for key, value in layer.items():
        if key not in known:
            raise UsageError(
                f"{path}: unknown key {key!r}{closest(key, known)}; accepted: {', '.join(known)}",
                hint=f"look at {path}",
            )
        kind, accepted = _kind(key)
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
            raise UsageError(f"{path}: {key} is {value!r}, but must be {kind}", hint=f"see {path}")
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise UsageError(f"{path}: {key} must be {kind}", hint=f"see {path}")
    if "env" in layer:
        layer["env"] = {name: str(value) for name, value in layer["env"].items()}
    if isinstance(layer.get("gpus-per-node"), int):
        layer["gpus-per-node"] = str(layer["gpus-per-node"])
    return layer


def _kind(key: str) -> tuple[str, tuple[type, ...]]:
    if key in _LISTS:
        return "a list of strings", (list,)
    if key in _NUMBERS:
        return "a whole number", (int,)
    if key in _BOUNDS:
        return "a number", (int, float)
    if key in _FLAGS:
        return "true or false", (bool,)
    if key == "nodes":
        return 'a whole number, or a range like "1-4"', (int, str)
    if key == "gpus-per-node":
        return 'a number or "type:number"', (int, str)
    return ("a table", (dict,)) if key == "env" else ("a string", (str,))


def job_spec(settings: Settings, cwd: Path) -> JobSpec:
    """Make the job of merged settings; `cwd` is the working directory that it will have.

    Raises
    ------
    UsageError
        no script is named, it doesn't exist, or a value is refused
    """
    if not settings.get("script"):
        raise UsageError(
            f"no script is named, neither as an argument nor in {PROJECT_FILE}",
            hint="hpc-ddp submit train.py",
        )
    script = (cwd / settings.values["script"]).absolute()
    if not script.is_file():
        raise UsageError(f"script {str(script)!r} does not exist", hint=f"ls {script.parent}")
    names = {field.name for field in fields(JobSpec)}
    values = {key.replace("-", "_"): value for key, value in settings.values.items()}
    given = {key: value for key, value in values.items() if key in names}
    given |= {"script": str(script), "workdir": working_directory(cwd, settings.get("chdir", ""))}
    given["name"] = settings.get("job-name") or name_for(script)
    in_container = bool(given.get("container") or given.get("image"))
    given.setdefault("python", default_python(given.get("setup", ()), in_container))
    return JobSpec(**given)


def working_directory(cwd: Path, text: str) -> str:
    """Return where a job is to run: here, or in the folder that ``chdir`` names.

    Raises
    ------
    UsageError
        it doesn't exist
    """
    path = (cwd / Path(text).expanduser()).absolute()
    if not path.is_dir():
        raise UsageError(f"working directory {str(path)!r} does not exist", hint="--chdir DIR")
    return str(path)


def runs_dir(settings: Settings, environ: Mapping[str, str]) -> Path:
    """Return the folder of all runs.

    That is ``runs-dir``, else ``HPC_DDP_RUNS``, else ``hpc-ddp`` below ``scratch`` (a site file
    has it) or ``$SCRATCH``, else ``./runs``. ``$NAME``, ``~`` and ``{account}`` are filled in.

    Raises
    ------
    UsageError
        a variable in it is not set here, or the account is not known
    """
    if text := settings.get("runs-dir") or environ.get("HPC_DDP_RUNS"):
        return _filled(text, settings, environ)
    scratch = settings.get("scratch") or environ.get("SCRATCH")
    return _filled(f"{scratch}/hpc-ddp" if scratch else "runs", settings, environ)


def _filled(text: str, settings: Settings, environ: Mapping[str, str]) -> Path:
    values = {**environ, "account": settings.get("account") or ""}
    try:
        filled = Template(text.replace("{account}", "${account}")).substitute(values)
    except KeyError as error:
        raise UsageError(
            f"the folder of runs is {text}, and {error.args[0]} is not set here",
            hint="export it, or --runs-dir DIR",
        ) from None
    except ValueError:  # a $ that is part of a name
        filled = text
    if "{account}" in text and not values["account"]:
        raise UsageError(
            f"the folder of runs is {text}, and no account is named",
            hint=f'account = "…" in {PROJECT_FILE}, --account, or --runs-dir DIR',
        )
    return Path(filled).expanduser().absolute()


def name_for(script: Path) -> str:
    """Return a job name made of a script's file name, without what a job name can't have."""
    return re.sub(r"[^\w.+=,@-]+", "-", script.stem).lstrip(".+=,@-")[:100] or "job"


def default_python(setup: Sequence[str], in_container: bool) -> str:
    """Return the interpreter for the workers when none is named.

    The one that runs now, where it has torch and no set-up line activates another environment.
    Else the first one on PATH, once the set-up lines are through. In a container, its own.
    """
    if in_container:
        return "python3"
    activates = any("activate" in line for line in setup)
    if not activates and find_spec("torch"):  # looks for it without importing it
        return sys.executable
    return "python" if setup or shutil.which("python") else "python3"
