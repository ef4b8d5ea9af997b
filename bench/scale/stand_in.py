"""The script of a rehearsal: its ranks count steps in place of a training.

It asks nothing of the shared disk but what its ranks have to: rank 0 writes its step when it is
told to stop, and each reads it at the start. What the rehearsal wants to know of a rank, and tells
it, lies in a folder in memory (argv[1]). With ``--log`` each rank prints a line in each step.
"""

import os
import signal
import sys
import time
from pathlib import Path

memory, state = Path(sys.argv[1]), Path(sys.argv[2])
rank, attempt = os.environ["RANK"], os.environ["HPC_DDP_ATTEMPT"]
stopped: list[float] = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(time.time()))
step = int(state.read_text()) if state.exists() else 0
(memory / f"started-{attempt}-{rank}").write_text(str(step))
while not stopped and not (memory / "finish").exists():
    time.sleep(0.2)
    step += 1
    if "--log" in sys.argv:
        print(f"step {step}", flush=True)
if stopped:
    (memory / f"stopped-{attempt}-{rank}").touch()
    if rank == "0":
        state.write_text(str(step))
os._exit(0)  # taking torch apart takes a second of CPU, and the nodes have two cores together
