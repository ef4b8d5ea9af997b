"""Fabric profiles: the NCCL and Gloo settings of an interconnect, as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_ddp.core.errors import UsageError, closest
from hpc_ddp.submission.package_files import folder
from hpc_ddp.submission.settings.trust import read_toml


def fabric_env(name: str) -> dict[str, str]:
    """Return the environment variables of a fabric, by name; {} for ``auto``, with which each node
    looks for its fabric itself.

    Raises
    ------
    UsageError
        there is no such fabric (the message names the known ones), or its profile is broken
    """
    files_by_name = {path.stem: path for path in _profile_paths()}
    if name not in files_by_name:
        raise UsageError(
            f"fabric {name!r} is unknown; accepted: {', '.join(files_by_name)}"
            + closest(name, files_by_name),
            hint="--fabric auto looks on the nodes what is there",
        )
    return _env_of(read_toml(files_by_name[name]))


def read_auto_profiles() -> dict[str, dict[str, str]]:
    """Return the variables of each fabric that a node may choose for ``auto``, by the fabric's
    name; profiles with ``by-auto = false`` are left out. Raise UsageError for a broken profile."""
    layers = {path.stem: read_toml(path) for path in _profile_paths()}
    return {name: _env_of(values) for name, values in layers.items() if values.get("by-auto", True)}


def _profile_paths() -> list[Path]:
    """Return the paths of the fabric profiles that come with hpc-ddp, sorted."""
    return sorted(folder("templates").joinpath("fabrics").glob("*.toml"))


def _env_of(values: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a profile, by name, as texts; {} where it has none. `values` is the
    profile's content."""
    return {key: str(value) for key, value in values.get("env", {}).items()}
