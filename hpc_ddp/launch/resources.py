"""The files that are not Python: templates, fabrics, sites."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """Return a top-level folder such as ``templates``: packaged in a wheel, else the checkout's."""
    packaged = PACKAGE / name
    return packaged if packaged.is_dir() else PACKAGE.parent / name
