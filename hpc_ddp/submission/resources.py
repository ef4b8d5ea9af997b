"""The files that are not Python: templates, fabrics, sites."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """Return a top-level folder such as ``templates``: packaged in a wheel, else the checkout's,
    which may be missing."""
    packaged = PACKAGE / name
    return packaged if packaged.is_dir() else PACKAGE.parent / name


def is_shipped(path: Path) -> bool:
    """Return whether a file came with hpc-ddp.

    Such files need no check of their owner: the account that installed them, a colleague's or a
    software team's, has installed the code that would check, too.
    """
    return path.resolve().is_relative_to(folder("templates"))
