"""The user of this process: also one that has no entry in the user database (a container's)."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from hpc_ddp.core.errors import UsageError


def home_folder() -> Path:
    """Return the home folder; raise UsageError where neither HOME nor the database has it."""
    try:
        return Path.home()  # noqa: TID251
    except RuntimeError:
        raise UsageError(
            f"user {os.getuid()} has no home folder: HOME is not set",
            hint="export HOME=FOLDER, one of your own",
        ) from None


def user_name() -> str:
    """Return the name in LOGNAME, USER or the user database; the number where none has it."""
    try:
        return getpass.getuser()  # noqa: TID251
    except (KeyError, OSError):  # by Python's version
        return str(os.getuid())
