"""Makes the folder of one task of an array, and reads what concerns this task."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import patiently, read_text, write_whole
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.events import Submitted
from hpc_ddp.core.journal.journal import last_event, read_events
from hpc_ddp.core.run_folder import RunFolder


def make_task(run: RunFolder, index: int) -> RunFolder:
    """Make the folder of task `index` of the array `run`, with the task's job.json and a link to
    the array's lib, and return it. Where the folder exists, only a job.json with another content is
    written anew.

    A disk in trouble is asked again for a minute (`patiently`). Raise OSError if it still refuses,
    UsageError if the array's job.json is broken, IndexError beyond the last task of a sweep.
    """
    array_spec = JobSpec.from_json(patiently(run.job_json.read_bytes))
    job = array_spec.task(index).to_json()

    def make() -> RunFolder:
        """Make the parts of the folder that are missing, and return it."""
        task = run.task(index).make()
        if not task.job_json.exists() or task.job_json.read_bytes() != job.encode():
            write_whole(task.job_json, job, mode=0o644)
        link = task.path / "lib"
        if not link.is_symlink():
            link.symlink_to(Path("..") / "lib")
        return task

    return patiently(partial(run.make_room_for, "a task", make))


def run_of_job(environ: Mapping[str, str], makes: bool = True) -> RunFolder:
    """Return the run that HPC_DDP_RUN in `environ` names; in a task of an array this task's run,
    whose folder is made (`make_task`), unless `makes` is False. Raise KeyError without a run,
    ValueError where a variable of hpc-ddp is damaged, and as `make_task`."""
    run = AttemptEnv.from_env(environ).run_folder
    task = environ.get("SLURM_ARRAY_TASK_ID")
    if not task or run.path.name == f"task-{task}":
        return run
    return make_task(run, int(task)) if makes else run.task(int(task))


def job_folder(run: RunFolder) -> RunFolder:
    """Return the run whose batch script the newest job of `run` has: a task's own, where the task
    was submitted alone after its array, else the array's; for a run that is no task, `run`. Raise
    OSError where the journal can't be read."""
    if not run.is_task:
        return run
    # The submit of an array is in its tasks' journals, too, but without the back-end.
    last = last_event(read_events(run.journal_folder, "submit"), Submitted)
    return run if last and last.backend else RunFolder(run.whole)


def trial_of(run: RunFolder) -> Mapping[str, str]:
    """Return the values, by parameter, that a sweep's task has; {} for any other run, and where the
    sweep's job.json is damaged or can't be read."""
    if not run.is_task:
        return {}
    try:
        return JobSpec.from_json(read_text(run.whole.joinpath("job.json"))).trials[run.index]
    except (OSError, UsageError, IndexError):
        return {}


def trial_text(run: RunFolder) -> str:
    """Return the trial of a task for people, as `` (lr=0.1 seed=2)``; '' without one."""
    words = [f"{name}={text}" for name, text in trial_of(run).items()]
    return f" ({' '.join(words)})" if words else ""
