"""Sites: the settings of a cluster that hold for every job there, as data.

A site file has the keys of a project file, and two more: ``title``, and a table ``match`` of
environment variables by which a login node of the site is known. The user's own files are in
``~/.config/hpc-ddp``, the shipped ones in ``templates/sites``. Settings of the user's file replace
those of the shipped file of the same name; between the two comes the file that the cluster's
operators have for all users (see `operators.find_site_file`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpc_ddp.core.errors import HpcDdpError, UsageError, closest
from hpc_ddp.core.file_io import write_whole
from hpc_ddp.submission.package_files import folder
from hpc_ddp.submission.settings import operators
from hpc_ddp.submission.settings.trust import read_toml

KEYS = ("title", "match")  # of site files only


def own_folder(home: Path) -> Path:
    """Return the path of the folder of a user's own site files; the folder may be missing."""
    return home / ".config" / "hpc-ddp"


def _folders(home: Path) -> tuple[Path, Path]:
    """Return the two folders of site files: the user's own, and the shipped one."""
    return own_folder(home), folder("templates") / "sites"


def find_files(site: str | None, home: Path, operators_file: Path | None) -> list[Path]:
    """Return the paths of a site's files that exist, in this order: the user's own, the operators'
    (`operators_file`, None for none), the shipped one.

    Without a name (`site` is None) the user's file is ``site.toml`` and the shipped one
    ``generic.toml``.

    Raises
    ------
    UsageError
        neither the user nor hpc-ddp has a file of that name
    """
    user_folder, shipped = _folders(home)
    paths = [user_folder / f"{site or 'site'}.toml", shipped / f"{site or 'generic'}.toml"]
    existing = [path for path in paths if path.is_file()]
    if site and not existing:
        names = sorted(
            path.stem for parent in (user_folder, shipped) for path in parent.glob("*.toml")
        )
        raise UsageError(
            f"site {site!r} is unknown; accepted: {', '.join(names)}{closest(site, names)}",
            hint=f"describe it in {paths[0]}",
        )
    return [path for path in (paths[0], operators_file, paths[1]) if path and path.is_file()]


def recognise(home: Path, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the site that the environment shows, and the variables that show it, with
    commas between them. The first site that fits counts; the user's own files come first.

    Return None where no site's ``match`` fits, or where the user has a ``site.toml``. A variable
    fits when its regular expression matches the whole value ('' for a variable that is not set);
    all variables of a site have to fit.

    Raises
    ------
    UsageError
        a ``match`` is no table of regular expressions, or a site file can't be read
    """
    user_folder, shipped = _folders(home)
    if (user_folder / "site.toml").is_file():
        return None
    for path in (*sorted(user_folder.glob("*.toml")), *sorted(shipped.glob("*.toml"))):
        match = read_toml(path).get("match", {})
        try:
            if match and all(re.fullmatch(match[name], environ.get(name, "")) for name in match):
                return path.stem, ", ".join(match)
        except (re.error, TypeError) as error:
            raise UsageError(
                f"{path}: match must be a table of variables and regular expressions: {error}",
                hint=f'NAME = "value" below [match] in {path}',
            ) from None
    return None


def read_shipped_keys(site: str) -> set[str]:
    """Return the keys of the shipped file of a site; an empty set where there is no such file.
    Raise UsageError where the file can't be read."""
    path = folder("templates") / "sites" / f"{site}.toml"
    return set(read_toml(path)) if path.is_file() else set()


def read_title(path: Path) -> str:
    """Return the title of a site file, '' where it has none. Raise UsageError where the file can't
    be read."""
    return str(read_toml(path).get("title", ""))


def all_files(home: Path) -> list[Path]:
    """Return the paths of all site files: the user's own, the operators', then the shipped ones.
    Raise UsageError where HPC_DDP_SITE_FILE names a file that does not exist."""
    user_files, shipped = (sorted(parent.glob("*.toml")) for parent in _folders(home))
    operators_file = operators.find_site_file(os.environ)
    return [*user_files, *([operators_file] if operators_file else []), *shipped]


def write_file(home: Path, name: str, text: str, force: bool) -> Path:
    """Write `text` to the user's own file of the site `name`, and return the file's path. Other
    users can read the file, and not write it. A missing folder is made.

    Raises
    ------
    UsageError
        `name` can't be a site's name; or the file exists, and `force` is False
    HpcDdpError
        the file can't be written
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(
            f"{name!r} can't be a site's name; accepted: letters, digits, and any of . _ -",
            hint="--name mycluster",
        )
    path = _folders(home)[0] / f"{name}.toml"
    if path.exists() and not force:
        raise UsageError(
            f"{path} is there, and was left as it is",
            hint="--print shows what would be written; --force replaces it; --name writes another",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, mode=0o644)  # a file that others can write would not be read
    except OSError as error:
        raise HpcDdpError(
            f"{path} can't be written: {error.strerror}", hint="hpc-ddp site detect --print"
        ) from None
    return path
