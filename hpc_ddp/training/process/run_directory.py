"""The folder of the run: the launcher's, or one below ``./runs`` under a plain start."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpc_ddp.core import process
from hpc_ddp.core.checkpoints import published
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import check_links, make_folders, write_json
from hpc_ddp.core.file_owners import check_executable, check_folder
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.events import Finished, RankFailed, Started, Stopped
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.process.environment import WORKER, DistEnv, LaunchEnv
from hpc_ddp.training.process.process_group import call_on_first
from hpc_ddp.training.process.rank_messages import Control

SILENT_S = 300.0  # a live run of another host writes its journal more often


def open_run(env: LaunchEnv, dist_env: DistEnv, control: Control) -> tuple[RunFolder, int]:
    """Return the run's folder and this attempt's number, the same on all ranks; it is a collective.

    Under the launcher both come from `env`, and rank 0 prints a warning where a notice would end
    the process above it. Under a plain start rank 0 makes the folder, claims the attempt, prints
    the folder and journals the start (`_claim_local`).

    Raises
    ------
    HpcDdpError
        under a plain start: another process is at work in the folder, it is another script's or
        user's, can be written or renamed by others, or can't be made, read or written
    RuntimeError
        a peer is gone
    """
    if env.run is not None and env.attempt is not None:
        if env.is_within and control.rank == 0:
            _warn_of_worker()
        return RunFolder(env.run), env.attempt
    path, attempt = call_on_first(control, partial(_claim_local, env, dist_env))
    return RunFolder(path), attempt


def _warn_of_worker() -> None:
    """Print a warning where a notice would end the worker's own process above this one, as that of
    `multiprocessing.spawn`, and the training with it."""
    worker_pid = int(os.environ[WORKER].partition(" ")[0])  # the variable is "<pid> <Slurm job>"
    if name := process.mortal_name(worker_pid):
        say(
            f"WARNING: this training runs below {name}, which dies of a preemption's signal, and"
            " the step with it, maybe before all is saved; hint: let hpc-ddp start a process for"
            " each rank: --nproc-per-node N"
        )


def _claim_local(env: LaunchEnv, dist_env: DistEnv) -> tuple[Path, int]:
    """On rank 0: make the folder ``<runs>/<script's name>/local``, or go on in it where its run is
    unfinished; the folder of a finished run is renamed first. Claim an attempt, print the folder,
    and journal the start.

    Return the folder and the attempt's number. Raise HpcDdpError if another process is at work in
    the folder, it is another script's or user's, others can write or rename it, or its job.json is
    broken; OSError if the disk refuses.
    """
    run = RunFolder(env.runs / env.stem / "local")
    check_folder(run)
    if os.path.lexists(run.path):
        check_links(run.path)
        check_executable(run)
    identity = {
        **process.identity(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restarts": os.environ.get("SLURM_RESTART_COUNT"),  # not set in a job's first start
    }
    make_folders(run.path.parent)
    # Of two starts at once, one would rename the other's new run as the finished one.
    with _hold_lock(run.path.parent / ".start"):
        finished = _move_away(run.path) if run.path.exists() and run.finished() else None
        attempt = run.make().claim_attempt(identity, partial(_may_be_live, run, identity))
    job = _job_of(env, dist_env)
    if not run.job_json.exists():
        write_json(run.job_json, asdict(job))
    else:
        _adopt_job(run, JobSpec.from_json(run.job_json.read_bytes()), job)
    remarks = f" (the finished one is now {finished})" if finished else ""
    if outer := os.environ.get("HPC_DDP_RUN"):
        remarks += f"; a run of its own: this process is no worker of {outer}"
    say(f"run: {run.path}{remarks}")
    run.journal("rank-0", attempt.number).write(Started(backend="local", **process.identity()))
    return run.path, attempt.number


def _job_of(env: LaunchEnv, dist_env: DistEnv) -> JobSpec:
    """Return the job of a plain start: this process's script, arguments and working folder."""
    return JobSpec(
        script=os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else env.stem,
        args=tuple(sys.argv[1:]),
        # A job's name has no other characters, and begins with a letter, a digit or "_".
        job_name=re.sub(r"[^\w .+=,@-]|^\W+", "_", env.stem)[:100],
        backend="local",
        nproc_per_node=dist_env.world_size,
        chdir=os.getcwd(),
    )


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Make a file, and hold the lock on it during the block; first wait for another process that
    holds it. On a file system without locks nothing is locked. Raise OSError where the file can't
    be made."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _may_be_live(run: RunFolder, identity: dict[str, Any], attempt: dict[str, Any]) -> bool:
    """Return whether an attempt of the run may be live. `attempt` has its host, process and Slurm
    job, `identity` those of this process.

    An attempt on another host is taken for live while the run's journal has changed in the last
    `SILENT_S` seconds, unless the journal has the end of its newest attempt, or Slurm has started
    this very job again since (one start of a job may have an attempt on each of several nodes). An
    attempt without a host is not live. Raise OSError where the journal can't be read.
    """
    if process.is_live(attempt):
        return True
    is_same_job = attempt.get("job") is not None and attempt.get("job") == identity["job"]
    is_earlier_start = is_same_job and attempt.get("restarts") != identity["restarts"]
    if attempt.get("host") in (None, identity["host"]) or is_earlier_start:
        return False
    events = run.events()
    newest = [event for event in events if event.attempt == events[-1].attempt] if events else []
    if last_event(newest, Finished, Stopped, RankFailed):  # the end of the newest attempt
        return False
    changed_at = max((path.stat().st_mtime for path in run.journal_folder.glob("*")), default=0.0)
    return time.time() - changed_at < SILENT_S


def _adopt_job(run: RunFolder, stored: JobSpec, job: JobSpec) -> None:
    """Go on with a run by `job`, which starts now: where its arguments or working folder differ
    from those of the `stored` job, write them into job.json. If the arguments differ and the run
    has a checkpoint, print the stored ones.

    Raise UsageError where the two jobs have different scripts, OSError if job.json can't be
    written, or the checkpoints can't be listed.
    """
    if stored.script != job.script:
        raise UsageError(
            f"{run.path} is a run of {stored.script}, and this is {job.script}",
            hint=f"rename or remove {run.path}, or set HPC_DDP_RUNS to another folder",
        )
    has_other_arguments = list(stored.args) != list(job.args)
    if has_other_arguments or stored.chdir != job.chdir:
        write_json(run.job_json, asdict(replace(stored, args=job.args, chdir=job.chdir)))
    if has_other_arguments and published(run.checkpoints):
        args = " ".join(stored.args) or "none"
        say(
            f"{run.path} was last started with other arguments ({args}); it goes on with the new"
            " ones; remove or rename the folder to start afresh"
        )


def _move_away(path: Path) -> Path:
    """Rename a folder to the first free ``<name>-<number>``; return that path.

    Raise OSError if the disk refuses.
    """
    number = 1
    while (target := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    path.rename(target)
    return target
