"""The folder of one task of an array."""

from __future__ import annotations

from pathlib import Path

from hpc_ddp.core.file_io import patiently, write_whole
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder


def task_of(run: RunFolder, index: int) -> RunFolder:
    """Make the folder of one task of an array, with its own job.json and a link to the array's lib,
    and return it. It can be repeated: job.json is written anew.

    Raise OSError if the disk refuses, UsageError if the array's job.json is broken, IndexError
    beyond the last task of a sweep.
    """
    array_spec = JobSpec.from_json(patiently(run.job_json.read_text))
    job = array_spec.task(index).to_json()

    def make() -> RunFolder:
        task = run.task(index).make()
        if not task.job_json.exists() or task.job_json.read_text() != job:
            write_whole(task.job_json, job)
        link = task.path / "lib"
        if not link.is_symlink():
            link.symlink_to(Path("..") / "lib")
        return task

    return patiently(make)
