"""Imports nothing that takes time. Its first attempt works until it is ended, the next is short.

    light.py --folder=FOLDER

A rank that gets SIGTERM takes the others with it; with DEAF all live through it.
"""

import os
import signal
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1].removeprefix("--folder="))
told, marker = folder / "told", folder / f"rank-{os.environ['RANK']}"


def leave(*_: object) -> None:
    told.touch()
    sys.exit(1)


signal.signal(signal.SIGTERM, signal.SIG_IGN if "DEAF" in os.environ else leave)
if not marker.exists():
    marker.touch()
    while not told.exists():
        time.sleep(0.1)
    sys.exit(1)
print("done by rank", os.environ["RANK"], flush=True)
