"""The part of torchrun's agent in the preflight: the questions on torch, which it imports anyway.

A fork of the agent answers them, since it may use the node's devices: CUDA can't be used in a fork
of a process that has used it, and the workers will be forks of the agent's.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

from hpc_ddp.node.net.place import Place
from hpc_ddp.node.preflight.agent_link import take_dialogue
from hpc_ddp.node.preflight.checks import answer_on_torch
from hpc_ddp.node.workers.worker import die_with_parent

FIT, UNFIT, AGAIN = 0, 10, 11  # exit codes of the fork


def await_outcome(place: Place) -> bool:
    """Have a fork of this process answer the preflight's questions on torch; return whether the
    training can start. A fork that ends without an outcome (`FIT`, `UNFIT`) is followed by another
    one, since the driver may begin again. Without an outcome, as after a notice, this waits until
    the process is killed. The process must not have threads; HPC_DDP_NODE is set."""
    while True:
        pid = os.fork()
        if not pid:
            _answer(place)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code in (FIT, UNFIT):
            return code == FIT


def _answer(place: Place) -> NoReturn:
    """Answer the driver's questions in this process, a fork, and exit with `FIT` or `UNFIT`, as the
    driver says; with `FIT`, too, where the nodes were found fit without this fork. The exit code is
    `AGAIN` where the driver has closed the dialogue without that word, or an exception, which is
    printed, came before it."""
    code = AGAIN
    try:
        die_with_parent()
        if dialogue := take_dialogue(place):
            connection, store_socket = dialogue
            with suppress(EOFError):  # the driver has closed the dialogue
                code = FIT if answer_on_torch(place, store_socket) else UNFIT
            connection.sendall(b"\n")
        else:
            code = FIT
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
