"""Fabric profiles: the NCCL and Gloo settings of an interconnect, as data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpc_ddp.core.errors import UsageError, closest
from hpc_ddp.submit.resources import folder, is_shipped
from hpc_ddp.submit.settings import trust

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds.

    Raises
    ------
    UsageError
        it can't be read, or isn't TOML; the message has the line. Or it may not act for the user
        (see `trust.read`)
    """
    try:
        content = path.read_bytes() if is_shipped(path) else trust.read(path)
        values: dict[str, Any] = tomllib.loads(content.decode())
        return values
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} can't be read as TOML: {error}", hint=f"look at {path}") from None


def fabric_env(name: str) -> dict[str, str]:
    """Return the environment variables of a fabric; none of `auto`, which nodes look up.

    Raises
    ------
    UsageError
        there is no such fabric; names those that there are
    """
    files_by_name = {path.stem: path for path in _files()}
    if name not in files_by_name:
        raise UsageError(
            f"fabric {name!r} is unknown; accepted: {', '.join(files_by_name)}"
            + closest(name, files_by_name),
            hint="--fabric auto looks on the nodes what is there",
        )
    return _env(read_toml(files_by_name[name]))


def for_auto() -> dict[str, dict[str, str]]:
    """Return the variables of the fabrics that `auto` may choose, by name: what nodes carry."""
    layers = {path.stem: read_toml(path) for path in _files()}
    return {name: _env(values) for name, values in layers.items() if values.get("by-auto", True)}


def _files() -> list[Path]:
    return sorted(folder("templates").joinpath("fabrics").glob("*.toml"))


def _env(values: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.get("env", {}).items()}
