"""Changes of a job that waits in the queue, made by one call of scontrol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hpc_ddp import slurm
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.options import JobSpec


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


def pause_of(job_id: str, pause_s: float) -> list[JobChange]:
    """Return the change by which a waiting job starts in `pause_s` seconds at the earliest; [] for
    0."""
    if not pause_s:
        return []
    # Slurm fails a job that starts within cred_expire (120 s) of its requeue.
    sooner = f"scontrol update JobId={job_id} StartTime=now+150"
    done = f"what its start lacks may come back: it waits {pause_s / 60:.0f} minutes, or {sooner}"
    return [JobChange(f"StartTime=now+{pause_s:.0f}", done)]


def full_limit(spec: JobSpec, limit_s: float | None) -> list[JobChange]:
    """Return the change by which a waiting job with ``--time-min`` has its ``--time`` again; [] for
    a job without ``--time-min``, or where `limit_s` is no shorter than ``--time``.

    `limit_s` is the limit in seconds that Slurm chose for this attempt (None: not known). The
    requeued job would keep it, and a user may raise a limit only while the job waits."""
    if not spec.time_min or (limit_s or 0) >= (spec.time_s or math.inf):
        return []
    text = f"the next attempt has the time limit of this one, and not {spec.time}: "
    return [JobChange(f"TimeLimit={spec.time}", refused=text)]
