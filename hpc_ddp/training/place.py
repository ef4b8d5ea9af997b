"""Where this run lives: as the launcher says, or below ``./runs`` under a plain start."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from hpc_ddp.run import process
from hpc_ddp.run.errors import HpcDdpError, UsageError
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.spec import JobSpec
from hpc_ddp.training.control import Control
from hpc_ddp.training.facts import DistInfo, Surroundings


def find(said: Surroundings, info: DistInfo, control: Control) -> tuple[RunFolder, int]:
    """Return the run's folder and this attempt's number, the same on all ranks.

    Raises
    ------
    HpcDdpError
        another process is at work in the folder
    """
    if said.run is not None and said.attempt is not None:
        return RunFolder(said.run), said.attempt
    # Rank 0 alone looks and claims; its error has to reach the others, who wait for a place.
    answer: Any = None
    if info.rank == 0:
        try:
            answer = _claim_local(said, info)
        except HpcDdpError as error:
            answer = error
    answer = control.from_first(answer)
    if isinstance(answer, HpcDdpError):
        raise answer
    path, attempt = answer
    return RunFolder(path), attempt


def _claim_local(said: Surroundings, info: DistInfo) -> tuple[Path, int]:
    """Make ``<runs>/<script's name>/local``, or take it up again where it is unfinished."""
    run = RunFolder(said.runs / said.stem / "local")
    if run.path.exists() and run.finished():
        _move_away(run.path)
    run.make()
    attempt = run.claim_attempt(process.identity(), process.is_live)
    if not run.job_json.exists():
        run.job_json.write_text(_job(said, info).to_json())
    else:
        _compare(run, JobSpec.from_json(run.job_json.read_text()), _script(said))
    run.journal("rank-0", attempt.number).write("started", backend="local", **process.identity())
    return run.path, attempt.number


def _compare(run: RunFolder, begun: JobSpec, script: str) -> None:
    """Refuse to go on with another script's run; say so where the arguments are others."""
    if begun.script != script:
        raise UsageError(
            f"{run.path} is a run of {begun.script}, and this is {script}",
            hint=f"rename or remove {run.path}, or set HPC_DDP_RUNS to another folder",
        )
    if list(begun.args) != sys.argv[1:]:
        args = " ".join(begun.args) or "none"
        print(
            f"hpc-ddp: {run.path} was begun with other arguments ({args});"
            " remove or rename the folder to start afresh",
            file=sys.stderr,
        )


def _job(said: Surroundings, info: DistInfo) -> JobSpec:
    return JobSpec(
        script=_script(said),
        args=tuple(sys.argv[1:]),
        name=re.sub(r"[^\w .+=,@-]|^\W+", "_", said.stem)[:100],
        backend="local",
        nproc_per_node=info.world_size,
        workdir=os.getcwd(),
    )


def _script(said: Surroundings) -> str:
    return os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else said.stem


def _move_away(path: Path) -> None:
    number = 1
    while (kept := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    path.rename(kept)
