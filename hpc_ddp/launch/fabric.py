"""Fabric profiles: the NCCL and Gloo settings of an interconnect, as data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpc_ddp.launch.resources import folder
from hpc_ddp.run.errors import UsageError, closest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds.

    Raises
    ------
    UsageError
        it can't be read, or isn't TOML; the message has the line
    """
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return values
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} can't be read as TOML: {error}", hint=f"look at {path}") from None


def fabric_env(name: str) -> dict[str, str]:
    """Return the environment variables of a fabric.

    Raises
    ------
    UsageError
        there is no such fabric; names those that there are
    """
    known = sorted(path.stem for path in folder("templates").joinpath("fabrics").glob("*.toml"))
    if name not in known:
        raise UsageError(
            f"fabric {name!r} is unknown; accepted: {', '.join(known)}{closest(name, known)}",
            hint="--fabric auto leaves the choice to NCCL",
        )
    values = read_toml(folder("templates") / "fabrics" / f"{name}.toml")
    return {key: str(value) for key, value in values.get("env", {}).items()}
