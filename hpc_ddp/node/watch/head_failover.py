"""The verdict of an elastic job that has lost its first node, and the batch shell with it.

Slurm takes a lost node out of a job with ``--no-kill`` and lets the rest be, also where that node
had the batch shell: nobody would decide how it goes on, and the job would stay until its limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.node import batch
from hpc_ddp.node.outcome.requeue import chain

if TYPE_CHECKING:
    from hpc_ddp.node.net.place import Place

PATIENCE_S = 900.0  # SlurmdTimeout is 300 s by default, and noticed a third later
PAUSE_S = 5.0
ASK_EVERY_S = 30.0
DEPUTY_INDICES = (1, 2)  # few, since all would ask the controller


def watch_head(place: Place, environ: dict[str, str]) -> threading.Event:
    """Start a thread that asks Slurm every `ASK_EVERY_S` whether the job still has its first node;
    return an event that the thread sets once the node is gone. Only nodes with the
    `DEPUTY_INDICES` start it: on other nodes, and without Slurm, the event is never set.

    torchrun on this node notices the loss later: it waits for an answer of the rendezvous as long
    as TCP does, a quarter of an hour where the link is cut.
    """
    is_gone = threading.Event()

    def ask_until_gone() -> None:
        """Ask Slurm every `ASK_EVERY_S` until the job has lost its first node; set the event."""
        while not is_gone.wait(ASK_EVERY_S):
            nodes = _nodes_left(environ)
            if nodes and place.nodes[0] not in nodes:
                is_gone.set()

    if place.index in DEPUTY_INDICES and "SLURM_JOB_ID" in environ:
        threading.Thread(target=ask_until_gone, daemon=True).start()
    return is_gone


def take_over_verdict(
    place: Place, environ: dict[str, str], has_notice: Callable[[], bool]
) -> None:
    """Wait for the fate of the job's first node. If Slurm has taken that node from the job, and the
    batch shell with it, and this node (`place`) is now the first one, give the verdict, which
    requeues or ends the job (`_end_job`); else do nothing.

    The supervisor of a node that has left an elastic job calls this. The wait ends once Slurm has
    taken the first node from the job, the first node has recorded its end, a later attempt has
    begun, or `has_notice` returns True; after `PATIENCE_S` at the latest, and without Slurm at
    once. Raises as `_end_job`, and OSError where the first node's folder can't be looked at.
    """
    first = place.attempt.node(place.nodes[0])
    give_up = time.monotonic() + PATIENCE_S
    while "SLURM_JOB_ID" in environ and not has_notice() and time.monotonic() < give_up:
        with suppress(OSError):  # the disk may be away
            if not place.run.is_newest(place.attempt.number):
                return
        nodes = _nodes_left(environ)
        if nodes and place.nodes[0] not in nodes:
            if nodes[0] == place.node:
                _end_job(environ)
            return
        if first.record.exists():
            return
        time.sleep(PAUSE_S)


def _end_job(environ: dict[str, str]) -> None:
    """Give the verdict and carry it out (`batch.give_verdict`); then cancel the job if it still has
    nodes, since without a batch shell it does not end by itself. A refusal of the cancel is passed
    over.

    An HpcDdpError of the verdict is printed; its other errors are raised, such as OSError if the
    run's folder can't be used.
    """
    try:
        batch.give_verdict(environ)
    except HpcDdpError as error:
        say(error.message)
    if _nodes_left(environ):
        with suppress(HpcDdpError):  # then the job ends at its time limit
            slurm.cancel([chain.own_id(environ)])


def _nodes_left(environ: dict[str, str]) -> list[str]:
    """Ask Slurm for the nodes that this start of the job still has, and return them in order; []
    where the job does not run, has been started again, or Slurm refuses or does not answer for
    `slurm.PATIENCE_S`. Raises KeyError outside of a job."""
    job_id = environ["SLURM_JOB_ID"]
    try:
        job = slurm.show_job(job_id)
        if job.state != "RUNNING" or job.restarts != AttemptEnv.from_env(environ).restarts:
            return []
        return slurm.expand_hosts(slurm.find_record(job_id).nodes)
    except HpcDdpError:
        return []
