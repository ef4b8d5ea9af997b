"""The folder of a task is made though its disk is away for a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.core import file_io
from hpc_ddp.core.job import task_folder
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.task_folder import make_task
from hpc_ddp.core.run_folder import RunFolder
from unit.fakes import stop_clock


def test_a_disk_that_is_read_only_for_seconds_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = stop_clock(monkeypatch, file_io)
    run = RunFolder(tmp_path / "run").make()
    run.job_json.write_text(JobSpec("t.py", array="0-1", sweep={"a": ("1", "2")}).to_json())
    write = file_io.write_whole
    refusals = [OSError(30, "Read-only file system")] * 3

    def refuse(path: Path, text: str, mode: int) -> None:
        if refusals:
            raise refusals.pop()
        write(path, text, mode)

    monkeypatch.setattr(task_folder, "write_whole", refuse)
    task = make_task(run, 1)
    assert len(clock.slept) == 3
    assert JobSpec.from_json(task.job_json.read_text()).args == ("--a=2",)
    assert task.lib.is_symlink()


def test_a_job_that_is_written_already_is_left_alone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run").make()
    run.job_json.write_text(JobSpec("t.py", array="0-1").to_json())
    task = make_task(run, 0)
    before = task.job_json.stat()
    make_task(run, 0)
    assert task.job_json.stat().st_ino == before.st_ino
    task.job_json.write_text("")  # of a start that was killed just then
    assert make_task(run, 0).job_json.stat().st_size == before.st_size
