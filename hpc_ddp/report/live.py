"""Whether anything works on a run, or still may: to be known before it is waited for or touched."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hpc_ddp import slurm
from hpc_ddp.run import process
from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Event, last_event


@dataclass(frozen=True)
class Queue:
    """What Slurm has of mine: `jobs` by id, the `scripts` of those that are not over, and the name
    of the `cluster` that was asked."""

    jobs: Mapping[str, slurm.Queued]
    scripts: Collection[str]
    cluster: str = ""


def queue() -> Queue | None:
    """Ask Slurm; None where there is none, or no answer, which is said."""
    if shutil.which("squeue") is None:
        return None
    try:
        cluster = slurm.show_config().get("ClusterName", "")
        return Queue(slurm.queue(), slurm.queued_scripts(), cluster)
    except HpcDdpError as error:
        print(f"hpc-ddp: {error.message}; what has a job is left alone", file=sys.stderr)
        return None


def at_work(run: RunFolder, queue: Queue | None) -> str:
    """Return what works on a run, or on a task of its array, or will; '' where nothing does.

    What can't be known counts as work: a job where there is no Slurm to ask, a process of another
    machine that has left no last word.
    """
    found = (_at_work(each, queue) for each in (run, *run.tasks()))
    return next(filter(None, found), "")


def _at_work(run: RunFolder, queue: Queue | None) -> str:
    events = run.events()
    jobs = run.job_ids(events)
    if queue is None and (jobs or last_event(events, "started") is None):
        # Also of one that was only rendered: anybody may have given that to sbatch.
        return f"job {jobs[-1] if jobs else '?'}, of a Slurm that can't be asked from here"
    if queue is not None:
        for job in jobs:
            if job in queue.jobs and queue.jobs[job].state not in slurm.OVER:
                return f"job {job}, {queue.jobs[job].state.lower()}"
        if os.path.realpath(run.script) in queue.scripts:  # somebody's own sbatch, say
            return "a job of its script"
        if "(null)" in queue.scripts and not jobs:
            return "perhaps a job whose script came through a pipe"
        last = last_event(events, "started", "verdict") or {}
        theirs = last.get("cluster")  # of a verdict there is none
        if theirs and queue.cluster and theirs != queue.cluster:
            return f"job {last.get('job_id')} of cluster {theirs}, which can't be asked from here"
    return _process(events)


def _process(events: list[Event]) -> str:
    started = last_event(events, "started")
    if started is None or "pid" not in started:
        return ""
    name = f"process {started['pid']} on {started.get('host')}"
    if process.is_live(started):
        return name
    here = [event for event in events if event["attempt"] == started["attempt"]]
    last_word = last_event(here, "verdict", "finished", "stopped", "failed")
    elsewhere = started.get("host") != socket.gethostname()
    return f"{name}, which can't be seen from here" if elsewhere and not last_word else ""
