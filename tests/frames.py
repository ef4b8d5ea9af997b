"""Whether hpc-ddp itself has failed on a node, beside the script that a test lets fail."""

from __future__ import annotations

import re

_OURS = re.compile(r'^.*File "[^"]*(?:hpc_ddp/node/|/lib/node\.py).*$', re.M)


def frames_of_ours(printed: str) -> list[str]:
    """Return the lines of tracebacks that are frames of the node-side part of hpc-ddp.

    A supervisor that crashes after the script has failed changes no exit code, and is seen
    nowhere else.
    """
    return _OURS.findall(printed)
