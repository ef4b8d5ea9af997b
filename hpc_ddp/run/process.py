"""Whether a process that somebody wrote down still runs."""

from __future__ import annotations

import os
import socket
from typing import Any


def is_live(info: dict[str, Any]) -> bool:
    """Tell whether the process with `info`'s ``host`` and ``pid`` runs on this machine."""
    if info.get("host") != socket.gethostname() or not info.get("pid"):
        return False
    try:
        os.kill(info["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
