"""The files that say what clusters are like: the user's own, and those that come with hpc-ddp."""

from __future__ import annotations

import re
from pathlib import Path

from hpc_ddp.launch.config import own_sites
from hpc_ddp.launch.resources import folder
from hpc_ddp.run.errors import HpcDdpError, UsageError


def all_files(home: Path) -> list[Path]:
    """Return all site files, the user's own first."""
    folders = (own_sites(home), folder("templates") / "sites")
    return [path for each in folders for path in sorted(each.glob("*.toml"))]


def write(home: Path, name: str, text: str, force: bool) -> Path:
    """Write one of the user's own site files, and return it.

    Raises
    ------
    UsageError
        it can't be a site's name, or, without `force`, the file is there
    HpcDdpError
        the file can't be written
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(
            f"{name!r} can't be a site's name; accepted: letters, digits, and any of . _ -",
            hint="--name mycluster",
        )
    path = own_sites(home) / f"{name}.toml"
    if path.exists() and not force:
        raise UsageError(
            f"{path} is there, and was left as it is",
            hint="--print shows what would be written; --force replaces it; --name writes another",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise HpcDdpError(
            f"{path} can't be written: {error.strerror}", hint="hpc-ddp site detect --print"
        ) from None
    return path
