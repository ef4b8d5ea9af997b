"""The folder of the run: the launcher's, or one below ``./runs`` under a plain start."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from hpc_ddp.core import process
from hpc_ddp.core.checkpoints import published
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import write_json
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.journal.events import Started
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.process.environment import DistEnv, LaunchEnv
from hpc_ddp.training.process.process_group import Control, on_first


def find(env: LaunchEnv, dist_env: DistEnv, control: Control) -> tuple[RunFolder, int]:
    """Return the run's folder and this attempt's number, the same on all ranks; it is a collective.

    Raises
    ------
    HpcDdpError
        another process is at work in the folder, it is another script's, or can't be made
    """
    if env.run is not None and env.attempt is not None:
        return RunFolder(env.run), env.attempt
    path, attempt = on_first(control, partial(_claim_local, env, dist_env))
    return RunFolder(path), attempt


def _claim_local(env: LaunchEnv, dist_env: DistEnv) -> tuple[Path, int]:
    """On rank 0: make ``<runs>/<script's name>/local``, or take it up again where it is unfinished.

    Return the folder and the attempt's number; raises as `find`.
    """
    run = RunFolder(env.runs / env.stem / "local")
    finished = _move_away(run.path) if run.path.exists() and run.finished() else None
    run.make()
    attempt = run.claim_attempt(process.identity(), process.is_live)
    job = JobSpec(
        script=os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else env.stem,
        args=tuple(sys.argv[1:]),
        job_name=re.sub(r"[^\w .+=,@-]|^\W+", "_", env.stem)[:100],
        backend="local",
        nproc_per_node=dist_env.world_size,
        chdir=os.getcwd(),
    )
    if not run.job_json.exists():
        write_json(run.job_json, asdict(job))
    else:
        _compare(run, JobSpec.from_json(run.job_json.read_text()), job)
    moved = f" (the finished one is now {finished})" if finished else ""
    say(f"run: {run.path}{moved}")
    run.journal("rank-0", attempt.number).write(Started(backend="local", **process.identity()))
    return run.path, attempt.number


def _compare(run: RunFolder, begun: JobSpec, job: JobSpec) -> None:
    """Refuse to go on with another script's run. Other arguments are the run's from here on: the
    script has them in any case; with a checkpoint a warning names the earlier ones.

    `begun` is the job in the run's folder. Raise UsageError for another script, OSError if the new
    arguments can't be written.
    """
    if begun.script != job.script:
        raise UsageError(
            f"{run.path} is a run of {begun.script}, and this is {job.script}",
            hint=f"rename or remove {run.path}, or set HPC_DDP_RUNS to another folder",
        )
    if list(begun.args) == list(job.args):
        return
    write_json(run.job_json, asdict(replace(begun, args=job.args, chdir=job.chdir)))
    if published(run.checkpoints):
        args = " ".join(begun.args) or "none"
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
