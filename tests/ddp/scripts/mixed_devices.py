"""A training whose second rank sees no device, as on a node whose driver is broken."""

import os

from hpc_ddp.training import devices, start

if os.environ["RANK"] == "1":
    devices.usable = lambda: None
start().finish()
