"""Whether kept copies are to be written anew, which a person asks for who reads the difference."""

from __future__ import annotations

import os


def is_accepted() -> bool:
    """Tell whether ``HPC_DDP_ACCEPT=1`` is set; never in CI, where a copy would equal itself."""
    accepted = bool(os.environ.get("HPC_DDP_ACCEPT"))
    assert not (accepted and os.environ.get("CI") == "true"), "HPC_DDP_ACCEPT is set in CI"
    return accepted
