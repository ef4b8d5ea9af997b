"""torchrun, with the three things changed that a requeued job needs.

``python <run>/lib/node.py agent`` takes torchrun's own command line. The differences:

- SIGTERM does nothing to it. A preempting Slurm may signal every process of the step, and
  torchrun would take that as its own death, kill the workers in mid-save and exit 1. A no-op
  handler, not "ignored": children inherit the latter, and then a worker that hangs can't be
  ended by the agent either.
- Workers are started through ``worker.py`` (log by rank, end with the agent).
- Which worker failed, when and how is written to ``failures.json`` instead of a table and a
  traceback; torchrun's own exit code is 1 whatever happened.

The only module of this room that imports torch: it runs in the worker's environment.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hpc_ddp.node.supervisor import split
from hpc_ddp.node.worker import die_with_parent, started_by
from hpc_ddp.run.folder import AttemptFolder, write_json


def escape(words: list[str]) -> list[str]:
    """Double each ``$``: torchrun expands ``${local_rank}`` in arguments, and ``$$`` to ``$``."""
    return [word.replace("$", "$$") for word in words]


def ignore_sigterm() -> None:
    """Keep torchrun from dying of SIGTERM, which it handles from the start of its workers on.

    Newer ones have ``--signals-to-handle`` for this; the handler's name is older, and in all.
    """
    from torch.distributed.elastic.multiprocessing import api

    theirs = api._terminate_process_handler

    def handler(signum: int, frame: FrameType | None) -> None:
        if signum != signal.SIGTERM:
            theirs(signum, frame)

    api._terminate_process_handler = handler


def launch(argv: list[str]) -> dict[str, Any] | None:
    """Run torchrun; return None when all workers exited 0, else what went wrong."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    options, script = split(argv)
    parse: Any = run.parse_args  # without types in torch
    args = parse([*options, "--no-python", "script"])
    args.training_script, *rest = started_by(sys.executable, script)
    args.training_script_args = escape(rest)
    config, command, command_args = run.config_from_args(args)
    ignore_sigterm()
    try:
        elastic_launch(config=config, entrypoint=command)(*command_args)
    except ChildFailedError as error:
        return {"failures": [_failure(rank, f) for rank, f in sorted(error.failures.items())]}
    return None


def _failure(rank: int, failure: Any) -> dict[str, Any]:
    return {"rank": rank, "code": failure.exitcode, "time": failure.timestamp}


def main(argv: list[str]) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda *_: None)
    die_with_parent()  # or the workers of a supervisor that is killed would go on by themselves
    os.environ["HPC_DDP_AGENT_PID"] = str(os.getpid())
    folder = Path(os.environ["HPC_DDP_NODE_FOLDER"])
    try:
        ended = launch(argv)
    except Exception as error:
        if "EADDRINUSE" in f"{error!r} {error.__cause__!r}":
            AttemptFolder(folder.parent).port_taken.touch()
        write_json(folder / "failures.json", {"agent": f"{type(error).__name__}: {error}"})
        raise
    if ended is not None:
        write_json(folder / "failures.json", ended)
    # Nothing is left to do, and taking torch apart takes a second of a preempted job's grace.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if ended is None else 1)
