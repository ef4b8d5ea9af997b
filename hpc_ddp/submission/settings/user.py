"""The user of this process, also one without an entry in the user database (a container's)."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from hpc_ddp.core.errors import UsageError


def home_folder() -> Path:
    """Return the user's home folder; raise UsageError where neither HOME nor the user database has
    one."""
    try:
        return Path.home()  # noqa: TID251
    except RuntimeError:
        raise UsageError(
            f"user {os.getuid()} has no home folder: HOME is not set",
            hint="export HOME=FOLDER, one of your own",
        ) from None


def user_name() -> str:
    """Return the user's name by LOGNAME, USER or the user database; the user's number where none
    has it."""
    try:
        return getpass.getuser()  # noqa: TID251
    except (KeyError, OSError):  # by Python's version
        return str(os.getuid())
