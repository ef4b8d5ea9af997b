"""Runs that are ready to start."""

from __future__ import annotations

from pathlib import Path

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.plan import PreparedRun


def prepare_run(root: Path) -> PreparedRun:
    run = RunFolder(root / "train" / "20260101-000000-abcd").make()
    return PreparedRun(JobSpec("train.py"), run, root, root / "train.py", is_new=True)
