"""The settings of a job, merged from options, ``hpc-ddp.toml``, and site files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from hpc_ddp.core.errors import UsageError, closest
from hpc_ddp.core.job.option_declaration import (
    ENVIRONMENT,
    FLAG,
    LIST,
    TEXT,
    Kind,
    option,
    options_of,
)
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_options import move_to_own_keys
from hpc_ddp.submission.settings import operators, sites
from hpc_ddp.submission.settings.defaults import NO_FILE, is_same_program, names_no_file
from hpc_ddp.submission.settings.trust import read_toml

T = TypeVar("T")

PROJECT_FILE = "hpc-ddp.toml"
# Settings of which a job can have one only.
EXCLUSIVE = (("cpus-per-node", "cpus-per-task"), ("container", "image"))
# Each option settles these variables of ``env``: in a layer below they do not count.
_SETTLED_ENV = {"interface": r"(NCCL|GLOO)_SOCKET_IFNAME", "fabric": r"(NCCL|RCCL|FI|UCX)_\w+"}
# A file's table [when.partition.NAME] counts only for jobs in this partition.
CHOICES = ("partition", "qos")


@dataclass(frozen=True)
class Placement:
    """The settings that are no part of a job: its site, and where its files are."""

    site: str | None = option(
        None, "A site file of templates/sites or yours.", group=ENVIRONMENT, metavar="NAME"
    )
    runs_dir: str | None = option(
        None, "The folder of all run folders.", group=ENVIRONMENT, metavar="DIR", is_local=True
    )
    scratch: str | None = option(
        None,
        "The folder on the parallel file system, for runs without --runs-dir.",
        group=ENVIRONMENT,
        is_file_only=True,
    )
    snapshot: bool = option(
        True, "Run the live code, not a copy of it.", group=ENVIRONMENT, is_local=True
    )
    snapshot_exclude: tuple[str, ...] = option(
        (),
        "Patterns of files that the copy of the code leaves out.",
        group=ENVIRONMENT,
        is_file_only=True,
    )


OPTIONS = options_of(JobSpec, Placement)
# A site's value of these comes first and the job's after it: neither works without the other.
# Slurm uses the last one of a repeated option.
JOINED = tuple(key for key, declared in OPTIONS.items() if declared.is_joined)
_KINDS = {"script": TEXT, "args": LIST} | {key: opt.kind for key, opt in OPTIONS.items()}


def known_keys() -> list[str]:
    """Return the keys that settings may have, sorted: the options' names, ``script`` and ``args``,
    but no names of a file's tables, such as ``when``."""
    return sorted(_KINDS)


@dataclass(frozen=True)
class Layer:
    """Values by key, and their origin: the command line, or the file at `path`, which is a
    project's, a user's own about a site, the operators', or a shipped profile."""

    kind: Literal["option", "project", "site", "operators", "profile"]
    values: dict[str, Any]
    path: Path | None = None


@dataclass(frozen=True)
class Settings:
    """Merged values, by key, and the layers that they come from. The first layer has precedence.

    `recognised` names the site that the environment shows, and the variables that show it ('':
    none). `limits` are the operators'.
    """

    values: Mapping[str, Any]
    layers: Sequence[Layer] = ()
    recognised: str = ""
    limits: operators.Limits | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, `default` where no layer has it."""
        return self.values.get(key, default)

    def layer(self, key: str, name: str | None = None) -> Layer | None:
        """Return the layer that a key's value comes from, None for a default.

        `name` narrows the search to one variable of ``env``, or one line of a list.
        """
        return next(
            (
                layer
                for layer in self.layers
                if key in layer.values and (name is None or name in layer.values[key])
            ),
            None,
        )


def find_project_file(start: Path) -> Path | None:
    """Return the nearest ``hpc-ddp.toml`` in the folder `start`, an absolute path, or above it;
    None where there is none."""
    return next(
        (p / PROJECT_FILE for p in (start, *start.parents) if (p / PROJECT_FILE).is_file()), None
    )


def load(options: Mapping[str, Any], cwd: Path, home: Path, is_strict: bool = True) -> Settings:
    """Return the settings of all layers. For a key the first layer that has it wins: option,
    project, own site file, operators' site file, profile; last a budget among the operators'
    limits.

    `options` are those of the command line, by key. The project file is looked for from `cwd`
    upwards, the user's own files in `home`. The site is the named one, else the user's own, else
    one that is recognised by the environment. A file's tables for the job's partition and QOS, also
    by sbatch's variables, come before the rest of the file.

    Some keys have rules of their own. `env` and `env-names` are merged name by name; a site's
    `setup`, `sbatch` and `srun` come before the job's; a site's `cpus-per-node` is scaled to the
    job's GPUs, and its `continue-by` does not count for an array; a file's `args` do not count for
    another script in `options`.

    Without `is_strict` no limits are read, and a layer that can't be used does not count, with a
    warning on stderr: the commands for existing runs have to work with broken settings.

    Raises
    ------
    UsageError
        if `is_strict`: a file can't be read or may not act for the user, has an unknown key (in the
        operators' that is a warning) or a value of the wrong kind, or there is no such site or
        operators' file
    """

    def usable(read_part: Callable[[], T], default: T) -> T:
        """Return what `read_part` returns. Unless `is_strict`, print its UsageError or OSError as a
        warning, and return `default`."""
        try:
            return read_part()
        except (UsageError, OSError) as error:
            if is_strict:
                raise
            text = getattr(error, "message", str(error))
            operators.warn(f"{text}; it does not count here", getattr(error, "hint", None))
            return default

    layers = [Layer("option", dict(options))]
    project = usable(partial(find_project_file, cwd), None)
    if project:
        layers.append(Layer("project", usable(partial(_read_layer, project), {}), project))
    site = next((layer.values["site"] for layer in layers if layer.values.get("site")), None)
    recognised_by = None if site else usable(partial(sites.recognised, home, os.environ), None)
    operators_file = usable(partial(operators.site_file, os.environ), None)
    name = recognised_by[0] if recognised_by else site
    nameless = [operators_file] if operators_file else []
    paths = usable(partial(sites.files, name, home, operators_file), nameless)
    read = [usable(partial(_site_layer, path, home, operators_file), None) for path in paths]
    of_site = [layer for layer in read if layer]
    limits = None
    if operators_file and is_strict:  # limits are for jobs that are to be
        limits = operators.read_limits(operators_file)
    of_shell = {key: os.environ.get(f"SBATCH_{key.upper()}", "") for key in CHOICES}
    chosen = {key: _first([*layers, *of_site], key) or of_shell[key] for key in CHOICES}
    layers, of_site = _with_tables(layers, chosen), _with_tables(of_site, chosen)
    below = _merge_layers([*layers[1:], *of_site])
    if "script" in options and not is_same_program(options, below, cwd):
        layers[0].values.setdefault("args", [])
    if limits:
        of_site.append(Layer("operators", limits.defaults, limits.path))
    values = _merged(_merge_layers(layers), _merge_layers(of_site))
    if values.get("array") and _first(layers, "continue-by") is None:
        values.pop("continue-by", None)  # no array can be a chain, wherever a site wants chains
    recognised = f"{recognised_by[0]} ({recognised_by[1]})" if recognised_by else ""
    return Settings(values, [*layers, *of_site], recognised, limits)


def _first(layers: Sequence[Layer], key: str) -> Any:
    """Return the value of a key in the first layer that has it; None where no layer has it."""
    return next((layer.values[key] for layer in layers if key in layer.values), None)


def _with_tables(layers: Sequence[Layer], chosen: Mapping[str, str]) -> list[Layer]:
    """Return the layers without their ``[when]`` tables. Before each layer stands a layer for each
    of its tables that counts for a job in the `chosen` partition and QOS: by key, one name or
    several with commas between them; '' for none."""
    expanded: list[Layer] = []
    for layer in layers:
        when = layer.values.get("when", {})
        for key, names in chosen.items():
            tables = when.get(key, {})
            named = (name for name in names.split(",") if name in tables)  # Slurm has lists
            expanded += [replace(layer, values=tables[name]) for name in named]
        values = {key: value for key, value in layer.values.items() if key != "when"}
        expanded.append(replace(layer, values=values))
    return expanded


def _merged(job: dict[str, Any], site: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a job over those of its site. The `JOINED` keys have both values, the
    site's first; ``cpus-per-node`` of the site is cut to the job's share (see `_share`)."""
    joined = {key: [*site.get(key, ()), *job[key]] for key in JOINED if key in job}
    return over({**site, **_share(site, job)}, job) | joined


def _share(site: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the site's ``cpus-per-node``, meant for all GPUs of a node, scaled to the job's GPUs;
    {} where the job has all GPUs or none, or the site has no such key."""
    all_gpus, job_gpus = _gpu_count(site), _gpu_count(job)
    if "cpus-per-node" not in site or not 0 < job_gpus < all_gpus:
        return {}
    return {"cpus-per-node": max(1, site["cpus-per-node"] * job_gpus // all_gpus)}


def _gpu_count(settings: Mapping[str, Any]) -> int:
    """Return the number in ``gpus-per-node``, as 4 in ``a100:4``; 0 where there is none."""
    match = re.search(r"\d+$", str(settings.get("gpus-per-node", "")))
    return int(match[0]) if match else 0


def _merge_layers(layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the merged values of layers, the first of which has precedence; {} for no layers."""
    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values = over(values, layer.values)
    return values


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `below` with those of the layer `above` over them.

    ``env`` and ``env-names`` are merged name by name; variables of ``env`` below that an option
    above settles are left out. A key above removes the keys that it excludes: a site's
    ``cpus-per-node`` does not count for a job with ``cpus-per-task``. A script above removes the
    `NO_FILE` flags below.
    """
    replaced = {key for pair in EXCLUSIVE if above.keys() & {*pair} for key in pair}
    values = {key: value for key, value in below.items() if key not in replaced}
    if "script" in above:  # the kind of the program below is not that of this one
        values = {key: value for key, value in values.items() if key not in NO_FILE}
    merged = _merge_env(below, above)
    return {**values, **above, **{key: merged[key] for key in merged if key in {**below, **above}}}


def _merge_env(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``env`` and ``env-names`` of the layers `below` and `above`, merged as `over` says; a
    variable of both layers is where the layer above has it."""
    settled = "|".join(names for key, names in _SETTLED_ENV.items() if above.get(key)) or "(?!)"
    env, names = above.get("env", {}), above.get("env-names", ())
    lower = {k: text for k, text in below.get("env", {}).items() if not re.fullmatch(settled, k)}
    passed_on = [name for name in (*below.get("env-names", ()), *names) if name not in env]
    return {
        "env": {k: text for k, text in lower.items() if k not in names} | env,
        "env-names": [*dict.fromkeys(passed_on)],
    }


def _site_layer(path: Path, home: Path, operators_file: Path | None) -> Layer:
    """Return the layer of a site file: the operators', the user's own, or a shipped profile. In the
    operators' (`operators_file`, if any) an unknown key is a warning. Raise UsageError for a file
    that can't be read or may not act for the user, and for a bad value."""
    if path == operators_file:
        return Layer("operators", _read_layer(path, (*sites.KEYS, "limits"), is_strict=False), path)
    is_user_file = path.parent == sites.own_folder(home)
    return Layer("site" if is_user_file else "profile", _read_layer(path, sites.KEYS), path)


def _read_layer(
    path: Path, more_keys: Sequence[str] = (), is_strict: bool = True
) -> dict[str, Any]:
    """Return a file's values, checked and changed by `_checked`, with its tables
    ``[when.partition.NAME]`` and ``[when.qos.NAME]`` under ``when``.

    Such a table may not set a partition, a QOS or a site. `more_keys` are accepted and left out:
    they belong to no job. Without `is_strict` an unknown key or table is left out with a warning:
    the operators' file may be for a newer hpc-ddp, and no user can mend it. Raise UsageError for a
    file that can't be read or may not act for the user, and for a bad value.
    """
    read, keys = read_toml(path), known_keys()
    when = read.pop("when", {})
    tables_of = when if isinstance(when, dict) else {str(when): None}
    layer = _checked(path, {k: v for k, v in read.items() if k not in more_keys}, keys, is_strict)
    inner = [key for key in keys if key not in (*CHOICES, "site")]
    for key, tables in tables_of.items():
        if key not in CHOICES or not isinstance(tables, dict):
            message = f"{path}: no table [when.{key}.…]"
            if not is_strict:
                operators.warn(f"{message}; it is left out", None)
                continue
            raise UsageError(
                f"{message}; accepted: [when.partition.NAME] and [when.qos.NAME]",
                hint=f"look at {path}",
            )
        layer.setdefault("when", {})[key] = {
            name: _checked(path, table, inner, is_strict, f"[when.{key}.{name}]")
            for name, table in tables.items()
        }
    return layer


def as_options(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the settings `values`, checked as those of a file, and changed in place by `_checked`.
    `where` is a file's path; or a program's name, which leaves relative paths as they are. Raise
    UsageError for an unknown key, and for a value of the wrong kind."""
    return _checked(Path(where), values, known_keys())


def _checked(
    path: Path, layer: Any, keys: Sequence[str], is_strict: bool = True, header: str = ""
) -> dict[str, Any]:
    """Return `layer`, the settings of a file or of one of its tables, after a check and changes in
    place: the paths of `script` (if a file), `template` and `notify` begin with the file's folder,
    or for ``~`` the home folder; variables and `gpus-per-node` become texts; some raw options of
    `sbatch` become keys (`move_to_own_keys`).

    `keys` are the accepted ones; without `is_strict` another key is dropped with a warning. Raise
    UsageError for an unknown key (if `is_strict`), for a value of the wrong kind, and for a `layer`
    that is no table; the hint is then `header`, the line that begins the table.
    """
    if not isinstance(layer, dict):
        raise UsageError(f"{path}: {layer!r} must be a table", hint=header)
    for key in [key for key in layer if key not in keys]:
        message = f"{path}: unknown key {key!r}{closest(key, keys)}; accepted: {', '.join(keys)}"
        if is_strict:
            raise UsageError(message, hint=f"look at {path}")
        operators.warn(message, f"tell the operators of this cluster: {path}")
        del layer[key]
    for key, value in layer.items():
        kind: Kind = _KINDS[key]
        if not isinstance(value, kind.types) or (isinstance(value, bool) and kind is not FLAG):
            text = f"{path}: {key} is {value!r}, but must be {kind.text}"
            raise UsageError(text, hint=kind.line_for(key, value) or f"see {path}")
        if isinstance(value, list) and not all(isinstance(line, str) for line in value):
            raise UsageError(f"{path}: {key} must be {kind.text}", hint=f"see {path}")
    # A path in a file is meant from there.
    paths = {"notify", "template", *(() if names_no_file(layer) else ["script"])}
    for key in paths & layer.keys():
        layer[key] = str(path.parent / os.path.expanduser(layer[key]))
    for name, value in layer.get("env", {}).items():  # others have another text in TOML than here
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            text = f"{path}: env.{name} is {value!r}, but must be a string or a whole number"
            raise UsageError(text, hint=f'put its value into quotes: {name} = "…"')
        layer["env"][name] = str(value)
    if isinstance(layer.get("gpus-per-node"), int):
        layer["gpus-per-node"] = str(layer["gpus-per-node"])
    return move_to_own_keys(layer, keys)
