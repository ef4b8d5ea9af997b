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
# Pairs of settings that exclude each other.
EXCLUSIVE = (("cpus-per-node", "cpus-per-task"), ("container", "image"))
# By an option: the variables that it decides. In ``env`` of a layer below they do not count.
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
# Lists of which the job gets the site's lines, and the job's own after them: neither works without
# the other. Slurm uses the last one of a repeated option.
JOINED = tuple(key for key, declared in OPTIONS.items() if declared.is_joined)
_KINDS = {"script": TEXT, "args": LIST} | {key: opt.kind for key, opt in OPTIONS.items()}


def known_keys() -> list[str]:
    """Return the keys that settings may have, sorted: the options' names, ``script`` and ``args``.
    Names of a file's tables, such as ``when``, are not among them."""
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
        """Return the layer that a key's value comes from, None for a default. With `name` it is the
        layer of one variable of ``env``, or of one line of a list."""
        return next(
            (
                layer
                for layer in self.layers
                if key in layer.values and (name is None or name in layer.values[key])
            ),
            None,
        )


def find_project_file(start: Path) -> Path | None:
    """Return the path of the nearest ``hpc-ddp.toml`` in the folder `start`, an absolute path, or
    above it; None where there is none."""
    paths = (folder / PROJECT_FILE for folder in (start, *start.parents))
    return next((path for path in paths if path.is_file()), None)


def load(options: Mapping[str, Any], cwd: Path, home: Path, is_strict: bool = True) -> Settings:
    """Return the settings of all layers. For a key the first layer that has it wins: option,
    project, own site file, operators' site file, profile; last a budget among the operators'
    limits.

    `options` are those of the command line, by key. The project file is looked for from `cwd`
    upwards, the user's own files in `home`. The site is the named one, else the user's own, else
    one that is recognised by the environment. A file's tables for the job's partition and QOS,
    which variables of sbatch may name, too, come before the rest of the file.

    Some keys have rules of their own. `env` and `env-names` are merged name by name; a site's
    lines of `JOINED` come before the job's; a site's `cpus-per-node` is scaled to the job's GPUs,
    and its `continue-by` does not count for an array; a file's `args` do not count for another
    script in `options`.

    Without `is_strict` no limits are read, and a layer that can't be used does not count, with a
    warning on stderr: the commands for existing runs have to work with broken settings.

    Raises
    ------
    UsageError
        if `is_strict`: a file can't be read or may not act for the user, has an unknown key (in the
        operators' file that is a warning) or a value of the wrong kind, or there is no such site or
        operators' file
    OSError
        if `is_strict`: a file's folder can't be looked at
    """

    def read_or(default: T, read_part: Callable[[], T]) -> T:
        """Return the result of `read_part`. Unless `is_strict`, print its UsageError or OSError as
        a warning, and return `default`."""
        try:
            return read_part()
        except (UsageError, OSError) as error:
            if is_strict:
                raise
            text = getattr(error, "message", str(error))
            operators.warn_once(f"{text}; it does not count here", getattr(error, "hint", None))
            return default

    job_layers = [Layer("option", dict(options))]
    if project := read_or(None, partial(find_project_file, cwd)):
        job_layers.append(Layer("project", read_or({}, partial(_read_layer, project)), project))
    named_sites = (layer.values["site"] for layer in job_layers if layer.values.get("site"))
    site = next(named_sites, None)
    recognised = None if site else read_or(None, partial(sites.recognise, home, os.environ))
    site = recognised[0] if recognised else site

    operators_file = read_or(None, partial(operators.find_site_file, os.environ))
    # Also of an unknown site the operators' file counts.
    of_operators = [operators_file] if operators_file else []
    paths = read_or(of_operators, partial(sites.find_files, site, home, operators_file))
    read = (read_or(None, partial(_read_site_layer, path, home, operators_file)) for path in paths)
    site_layers = [layer for layer in read if layer]
    limits = None
    if operators_file and is_strict:  # commands for existing runs, which are not strict, plan none
        limits = operators.read_limits(operators_file)

    of_shell = {key: os.environ.get(f"SBATCH_{key.upper()}", "") for key in CHOICES}
    chosen = {key: _first([*job_layers, *site_layers], key) or of_shell[key] for key in CHOICES}
    job_layers, site_layers = _with_tables(job_layers, chosen), _with_tables(site_layers, chosen)
    of_files = _merge_layers([*job_layers[1:], *site_layers])
    if "script" in options and not is_same_program(options, of_files, cwd):
        job_layers[0].values.setdefault("args", [])
    if limits:
        site_layers.append(Layer("operators", limits.defaults, limits.path))
    values = _merge_sides(_merge_layers(job_layers), _merge_layers(site_layers))
    if values.get("array") and _first(job_layers, "continue-by") is None:
        values.pop("continue-by", None)  # a site's wish for chains: no array can be one
    name_and_variables = f"{recognised[0]} ({recognised[1]})" if recognised else ""
    return Settings(values, [*job_layers, *site_layers], name_and_variables, limits)


def _first(layers: Sequence[Layer], key: str) -> Any:
    """Return the value of a key in the first layer that has it; None where no layer has it."""
    return next((layer.values[key] for layer in layers if key in layer.values), None)


def _with_tables(layers: Sequence[Layer], chosen: Mapping[str, str]) -> list[Layer]:
    """Return the layers without their ``[when]`` tables. Before each layer stands a layer for each
    of its tables that counts for a job in the `chosen` partition and QOS: by key (`CHOICES`), one
    name or several with commas between them; '' for none."""
    expanded: list[Layer] = []
    for layer in layers:
        when = layer.values.get("when", {})
        for key, names in chosen.items():
            tables = when.get(key, {})
            matching = (name for name in names.split(",") if name in tables)
            expanded += [replace(layer, values=tables[name]) for name in matching]
        values = {key: value for key, value in layer.values.items() if key != "when"}
        expanded.append(replace(layer, values=values))
    return expanded


def _merge_sides(job: dict[str, Any], site: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a job put over those of its site. The `JOINED` keys have both values,
    the site's first; ``cpus-per-node`` of the site is cut to the job's share."""
    joined = {key: [*site.get(key, ()), *job[key]] for key in JOINED if key in job}
    return put_over({**site, **_scaled_cpus(site, job)}, job) | joined


def _scaled_cpus(site: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
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
        values = put_over(values, layer.values)
    return values


def put_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `below`, replaced by those `above` key by key.

    ``env`` and ``env-names`` are merged name by name; variables of ``env`` below that an option
    above decides (`_SETTLED_ENV`) are left out. A key above removes the keys that it excludes: a
    site's ``cpus-per-node`` does not count for a job with ``cpus-per-task``. A script above removes
    the `NO_FILE` flags below, which are those of another program.
    """
    replaced = {key for pair in EXCLUSIVE if above.keys() & {*pair} for key in pair}
    if "script" in above:
        replaced |= {*NO_FILE}
    values = {key: value for key, value in below.items() if key not in replaced}
    env = _merge_env(below, above)
    return {**values, **above, **{key: env[key] for key in env if key in {**below, **above}}}


def _merge_env(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``env`` and ``env-names`` of two layers, by these keys, merged as `put_over` says. A
    variable that both layers have stays under the key of the layer above."""
    # (?!) matches nothing.
    settled = "|".join(names for key, names in _SETTLED_ENV.items() if above.get(key)) or "(?!)"
    env, names = above.get("env", {}), above.get("env-names", ())
    lower = {k: text for k, text in below.get("env", {}).items() if not re.fullmatch(settled, k)}
    all_names = [name for name in (*below.get("env-names", ()), *names) if name not in env]
    return {
        "env": {k: text for k, text in lower.items() if k not in names} | env,
        "env-names": [*dict.fromkeys(all_names)],
    }


def _read_site_layer(path: Path, home: Path, operators_file: Path | None) -> Layer:
    """Return the layer of a site file: the operators' (`operators_file`, None for none), the user's
    own (below `home`), or a shipped profile. In the operators' file an unknown key is a warning.
    Raise UsageError for a file that can't be read or may not act for the user, for an unknown key
    in another file, and for a bad value."""
    if path == operators_file:
        return Layer("operators", _read_layer(path, (*sites.KEYS, "limits"), is_strict=False), path)
    is_user_file = path.parent == sites.own_folder(home)
    return Layer("site" if is_user_file else "profile", _read_layer(path, sites.KEYS), path)


def _read_layer(
    path: Path, more_keys: Sequence[str] = (), is_strict: bool = True
) -> dict[str, Any]:
    """Return a file's values, by key, checked and changed by `_check_and_convert`, with its tables
    ``[when.partition.NAME]`` and ``[when.qos.NAME]`` under ``when``.

    Such a table may not set a partition, a QOS or a site. `more_keys` are accepted and left out:
    they belong to no job. Without `is_strict` an unknown key or table is left out with a warning:
    the operators' file may be for a newer hpc-ddp, and no user can mend it. Raise UsageError for a
    file that can't be read or may not act for the user, for a bad value, and, if `is_strict`, for
    an unknown key or table.
    """
    content, keys = read_toml(path), known_keys()
    when = content.pop("when", {})
    tables_of = when if isinstance(when, dict) else {str(when): None}  # refused below
    values = {key: value for key, value in content.items() if key not in more_keys}
    layer = _check_and_convert(path, values, keys, is_strict)
    inner_keys = [key for key in keys if key not in (*CHOICES, "site")]
    for key, tables in tables_of.items():
        if key not in CHOICES or not isinstance(tables, dict):
            message = f"{path}: no table [when.{key}.…]"
            if not is_strict:
                operators.warn_once(f"{message}; it is left out", None)
                continue
            raise UsageError(
                f"{message}; accepted: [when.partition.NAME] and [when.qos.NAME]",
                hint=f"look at {path}",
            )
        layer.setdefault("when", {})[key] = {
            name: _check_and_convert(path, table, inner_keys, is_strict, f"[when.{key}.{name}]")
            for name, table in tables.items()
        }
    return layer


def as_options(values: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the settings `values`, by key, checked and changed as those of a file; `values` are
    changed in place. `origin` is for the messages: a file's path; or a program's name, with which
    relative paths stay as they are. Raise UsageError for an unknown key, and for a value of the
    wrong kind."""
    return _check_and_convert(Path(origin), values, known_keys())


def _check_and_convert(
    path: Path, layer: Any, keys: Sequence[str], is_strict: bool = True, header: str = ""
) -> dict[str, Any]:
    """Check `layer`, the settings of the file at `path` or of one of its tables, change it in
    place, and return it. The paths of `script` (if a file), `template` and `notify` then begin with
    the file's folder; with the home folder in place of ``~`` or ``~user`` these and `image` and
    `python` do; variables and `gpus-per-node` are texts; some raw options of `sbatch` are keys
    (`with_own_keys`).

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
        operators.warn_once(message, f"tell the operators of this cluster: {path}")
        del layer[key]
    _check_kinds(path, layer)
    # A relative path in a file is seen from the file's folder.
    paths = {"notify", "template", *(() if names_no_file(layer) else ["script"])}
    for key in {*paths, "image", "python"} & layer.keys():
        expanded = os.path.expanduser(layer[key])
        layer[key] = str(path.parent / expanded) if key in paths else expanded
    # Values of other types have another text here than in TOML, as True for true.
    for name, value in layer.get("env", {}).items():
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            text = f"{path}: env.{name} is {value!r}, but must be a string or a whole number"
            raise UsageError(text, hint=f'put its value into quotes: {name} = "…"')
        layer["env"][name] = str(value)
    if isinstance(layer.get("gpus-per-node"), int):
        layer["gpus-per-node"] = str(layer["gpus-per-node"])
    return move_to_own_keys(layer, keys)


def _check_kinds(path: Path, layer: Mapping[str, Any]) -> None:
    """Raise UsageError for a value of the wrong kind in `layer`, settings of the file at `path`
    with known keys."""
    for key, value in layer.items():
        kind: Kind = _KINDS[key]
        # For Python a bool is an int, too.
        if not isinstance(value, kind.types) or (isinstance(value, bool) and kind is not FLAG):
            text = f"{path}: {key} is {value!r}, but must be {kind.text}"
            raise UsageError(text, hint=kind.line_for(key, value) or f"see {path}")
        if isinstance(value, list) and not all(isinstance(line, str) for line in value):
            raise UsageError(f"{path}: {key} must be {kind.text}", hint=f"see {path}")
