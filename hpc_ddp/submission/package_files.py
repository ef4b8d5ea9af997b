"""The files that are not Python: ``templates`` with the fabrics and sites in it, and ``jobs``."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """Return the path of a folder with files that are not Python, as ``templates``: inside the
    installed package (as from a wheel) if it is there, else in the checkout. That one may be
    missing."""
    packaged = PACKAGE / name
    return packaged if packaged.is_dir() else PACKAGE.parent / name


def is_shipped(path: Path) -> bool:
    """Return whether a file lies in hpc-ddp's own ``templates``.

    Such files need no check of their owner: the account that installed them, a colleague's or a
    software team's, has installed the code that would check, too.
    """
    return Path(os.path.realpath(path)).is_relative_to(folder("templates"))
