"""Waits for its end once it has marked its first step, and ends well in the next attempt."""

import os
import sys
import time

print(f"prefix {sys.prefix}", flush=True)
if os.environ["HPC_DDP_ATTEMPT"] == "0":
    with open(os.environ["HPC_DDP_OPENED_FILES"], "a") as record:
        record.write("first step\n")
    time.sleep(600)
