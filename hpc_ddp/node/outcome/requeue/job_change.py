"""Changes of a job that waits in the queue, made by one call of scontrol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpc_ddp import slurm
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError


class JobChange(NamedTuple):
    """A change of a job, as scontrol's `setting` (``TimeLimit=60``); the line to print once it is
    made, '' for none, and the words to print before Slurm's reason where it is refused."""

    setting: str
    done: str = ""
    refused: str = ""


def change_job(job_id: str, changes: Sequence[JobChange]) -> bool:
    """Have Slurm make `changes` of a waiting job, all in one call: little time may be left. Where
    Slurm refuses that, each is tried alone. Changes that are made and refusals are printed. Return
    whether all were made."""
    if not changes:
        return True
    try:
        slurm.update_job(job_id, *(change.setting for change in changes))
    except HpcDdpError as error:
        if len(changes) == 1:
            say(f"{changes[0].refused}{error.message}")
            return False
        return all([change_job(job_id, [change]) for change in changes])
    for change in changes:
        if change.done:
            say(change.done)
    return True
