"""Messages of a node to the driver: lines of JSON on stdout, which srun carries.

They need neither the shared disk nor a link between nodes. A message may have several of:

===========  ==================================================================
``stage``    one that the node has completed: start, local, partners, torch, exchange
``contact``  how other nodes reach this one
``values``   findings for the journal
``note``     a remark for the journal and the job's output
``fault``    a check that the node has failed, with ``why``
``trouble``  a partner, with ``check``, ``why`` and perhaps ``turn`` or ``late``
``notice``   a signal that asks the attempt to end
``gone``     torchrun's agent has ended, which was to answer
===========  ==================================================================
"""

from __future__ import annotations

import json
import os
from typing import Any

MARK = "hpc-ddp-preflight "  # of a message: set-up lines and containers print as well
TEXT_BYTES = 500  # of a reason: Slurm breaks lines of more than 1024


def report(**message: Any) -> None:
    """Print a message with these fields (see the module) and this node's name to stdout, in one
    write, since several threads of a node print.

    Texts are cut to `TEXT_BYTES` of JSON each, apart from those inside lists and dicts. Raises
    KeyError without HPC_DDP_NODE, OSError where stdout is closed.
    """
    cut = {key: _cut(text) for key, text in message.items() if isinstance(text, str)}
    line = json.dumps({"node": os.environ["HPC_DDP_NODE"], **message, **cut}, ensure_ascii=False)
    os.write(1, f"{MARK}{line}\n".encode())


def _cut(text: str) -> str:
    """Return as much of the beginning of a text as has at most `TEXT_BYTES` in JSON. Bytes that are
    no Unicode, as a file's name may have, become ``?``."""
    text = text.encode(errors="replace")[:TEXT_BYTES].decode(errors="ignore")
    while len(json.dumps(text, ensure_ascii=False).encode()) > TEXT_BYTES + 2:  # 2: the quotes
        text = text[:-1]
    return text
