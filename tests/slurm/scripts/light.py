"""Imports nothing that takes time. Its first attempt works until it is ended, the next is short.

    light.py --folder=FOLDER

With DEAF it lives through a SIGTERM.
"""

import os
import signal
import sys
import time
from pathlib import Path

if "DEAF" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
marker = Path(sys.argv[1].removeprefix("--folder="), f"rank-{os.environ['RANK']}")
if not marker.exists():
    marker.touch()
    time.sleep(600)
print("done by rank", os.environ["RANK"], flush=True)
