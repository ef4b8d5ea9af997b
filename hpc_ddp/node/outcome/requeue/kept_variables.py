"""Values that a later job of a run takes over from its first job: a requeue of Slurm's keeps them.

A later job is one that was queued where a requeue was refused, the next job of a chain, or the job
of ``submit --run``. Slurm gives it variables of its own.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_values import array_indexes
from hpc_ddp.core.job.variables import SECRET_NAME_OF_BASH, URL_WITH_PASSWORD
from hpc_ddp.core.journal.journal import first_attempt
from hpc_ddp.core.run_folder import RunFolder

# The variable with Slurm's own count of this job's restarts: `variables` may change Slurm's.
RESTARTS = "HPC_DDP_SLURM_RESTARTS"
FIRST_START = "HPC_DDP_FIRST_START"


def variables(run: RunFolder, starts: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return, by name, the variables to set in this job, so that its script goes on as in the run's
    first job. `starts` is the number of attempts before this one (None: `count_starts`), `environ`
    this job's environment.

    SLURM_RESTART_COUNT is `starts`, or Slurm's own count where that is greater: scripts resume by
    it. It is left out if it is 0. SLURM_SUBMIT_DIR is the folder of the first submit. In a task of
    an array the number of tasks, and the range and step of their indexes, are those of the whole
    array: scripts share out their data by them, and this job may have only some of the tasks.
    `RESTARTS` has Slurm's own count. HPC_DDP_FIRST_START is ``yes`` until the run's first attempt
    is over, also after a ``--fresh``: set-up lines may delete old results by it. Raises OSError
    where the run's job.json or journal can't be read, UsageError where job.json is broken.
    """
    # A disk that is away has no attempts: so job.json is read behind the count.
    starts = count_starts(run) if starts is None else starts
    array = RunFolder(run.whole)
    spec = JobSpec.from_json(array.job_json.read_bytes())
    own_restarts = environ.get(RESTARTS) or environ.get("SLURM_RESTART_COUNT") or "0"
    values = {RESTARTS: own_restarts}
    if not starts and not first_attempt(run.events()):
        values[FIRST_START] = "yes"
    if restarts := max(starts, int(own_restarts)):
        values["SLURM_RESTART_COUNT"] = str(restarts)
    if spec.submit_dir:
        values["SLURM_SUBMIT_DIR"] = spec.submit_dir
    if run.is_task and spec.array:
        indexes = sorted({*array_indexes(spec.array), run.index})
        step = re.fullmatch(r"\d+-\d+(?::(\d+))?(%\d+)?", spec.array)  # as 0-9:2%4; no list
        values |= {
            "SLURM_ARRAY_TASK_COUNT": str(len(indexes)),
            "SLURM_ARRAY_TASK_MIN": str(indexes[0]),
            "SLURM_ARRAY_TASK_MAX": str(indexes[-1]),
            **({"SLURM_ARRAY_TASK_STEP": step[1] or "1"} if step else {}),
        }
    return values


def count_starts(run: RunFolder) -> int:
    """Return how many attempts a run has had since its last ``--fresh``, or in all without one.
    Raises OSError where the run's folder can't be read."""
    return run.next_attempt() - first_attempt(run.events())


def env_before_setup(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment that the batch shell had before its set-up lines: a new job runs these
    lines again, and their exports must not count twice. HPC_DDP_UMASK and secrets have the values
    that they have in `environ`, the environment now.

    The batch script has written that environment, without secrets, to a file. `environ` itself is
    returned for a job without set-up lines, where the file can't be read or is another user's, and
    where the earlier environment finds no sbatch."""
    try:
        path = _file(environ)
        if path.lstat().st_uid != os.geteuid():
            return environ
        text = path.read_bytes().decode(errors="surrogateescape")
    except (OSError, KeyError):
        return environ
    values = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    if shutil.which("sbatch", path=values.get("PATH")) is None:  # a module has brought sbatch
        return environ
    is_from_now = re.compile(f"^HPC_DDP_UMASK$|{SECRET_NAME_OF_BASH}").search
    has_password = re.compile(URL_WITH_PASSWORD).search
    now = {n: text for n, text in environ.items() if is_from_now(n.upper()) or has_password(text)}
    return {**values, **now}


def delete_env_before_setup(environ: Mapping[str, str]) -> None:
    """Remove the file that `env_before_setup` reads; nothing is raised."""
    with suppress(OSError, KeyError):
        _file(environ).unlink()


def _file(environ: Mapping[str, str]) -> Path:
    """Return the path of the file with the environment from before the set-up lines: in the run's
    folder if it exists there, else in that of its array. Raise KeyError without a job or a run."""
    run = RunFolder(Path(environ["HPC_DDP_RUN"]))
    folders = (run, RunFolder(run.whole))  # a task's job may have its own script, or its array's
    paths = [folder.logs / f".environ-{environ['SLURM_JOB_ID']}" for folder in folders]
    return next(filter(Path.exists, paths), paths[-1])
