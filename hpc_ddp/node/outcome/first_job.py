"""Values that a later job of a run takes over from its first one: a requeue of Slurm's keeps them.

A later job is one that was queued where a requeue is refused, the next one of a chain, and that of
``submit --run``. Slurm gives it variables of its own.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpc_ddp.core.console.terminal import answer
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.checks import SECRET_NAME_OF_BASH, URL_WITH_PASSWORD
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_values import array_indexes
from hpc_ddp.core.job.task_folder import run_of_job
from hpc_ddp.core.job.variables import export_lines
from hpc_ddp.core.journal.journal import first_attempt
from hpc_ddp.core.run_folder import RunFolder

# Slurm's count in the job that this is, where `variables` has set another one.
RESTARTS = "HPC_DDP_SLURM_RESTARTS"


def variables(run: RunFolder, starts: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return, by name, the variables to set in this job, so that its script goes on as in the run's
    first job. `starts` is the number of attempts before this one, `environ` this job's environment.

    SLURM_RESTART_COUNT counts those attempts: scripts resume by it. SLURM_SUBMIT_DIR is the folder
    of the first submit. In a task of an array the number of tasks and the range of their indexes
    are those of the whole array, since scripts share out their data by them, and this job may have
    only some of the tasks. `RESTARTS` has Slurm's own count. Raises OSError where the run's
    job.json can't be read, UsageError where it is broken.
    """
    array = RunFolder(run.whole)
    spec = JobSpec.from_json(array.job_json.read_bytes())
    own_restarts = environ.get(RESTARTS) or environ.get("SLURM_RESTART_COUNT") or "0"
    values = {RESTARTS: own_restarts}
    if restarts := max(starts, int(own_restarts)):
        values["SLURM_RESTART_COUNT"] = str(restarts)
    if spec.submit_dir:
        values["SLURM_SUBMIT_DIR"] = spec.submit_dir
    if run.is_task and spec.array:
        indexes = sorted({*array_indexes(spec.array), run.index})
        step = re.fullmatch(r"\d+-\d+(?::(\d+))?(%\d+)?", spec.array)
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


def before_setup(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment that the batch shell had before its set-up lines, but HPC_DDP_UMASK,
    and secrets, as in `environ`, the environment now. A new job runs the set-up lines again, and
    their exports must not count twice.

    The batch script has written that environment, without secrets, to a file. `environ` itself is
    returned for a job without set-up lines, where the file can't be read or is another user's, and
    where only `environ` finds sbatch."""
    try:
        path = _file(environ)
        if path.lstat().st_uid != os.geteuid():
            return environ
        text = path.read_bytes().decode(errors="surrogateescape")
    except (OSError, KeyError):
        return environ
    values = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    if shutil.which("sbatch", path=values.get("PATH")) is None:  # a module has brought it
        return environ
    is_late = re.compile(f"^HPC_DDP_UMASK$|{SECRET_NAME_OF_BASH}").search
    has_password = re.compile(URL_WITH_PASSWORD).search
    late = {n: text for n, text in environ.items() if is_late(n.upper()) or has_password(text)}
    return {**values, **late}


def forget_before_setup(environ: Mapping[str, str]) -> None:
    """Remove the file that `before_setup` reads; nothing is raised."""
    with suppress(OSError, KeyError):
        _file(environ).unlink()


def _file(environ: Mapping[str, str]) -> Path:
    """Return the path of the file with the environment from before the set-up lines; raise KeyError
    without a job or a run. The file is in the folder whose script runs (`job_folder`)."""
    run = RunFolder(Path(environ["HPC_DDP_RUN"]))
    paths = [
        part.logs / f".environ-{environ['SLURM_JOB_ID']}" for part in (run, RunFolder(run.whole))
    ]
    return next(filter(Path.exists, paths), paths[-1])


def main(_: list[str]) -> int:
    """Give the batch script, before its set-up lines, the lines that export `variables`, and return
    0. Where the run's folder can't be used, or a variable or file is damaged, no line is given:
    ``batch begin``, which comes later, reports the error."""
    environ = dict(os.environ)
    with suppress(HpcDdpError, OSError, KeyError, ValueError):
        run = run_of_job(environ)
        answer(export_lines(variables(run, count_starts(run), environ)))
    return 0
