"""Scripts and their folders are copied into the run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission import snapshot
from hpc_ddp.submission.resources import PACKAGE


def test_a_broken_git_index_is_named(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / ".git" / "index").write_text("x")
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    with pytest.raises(UsageError, match=r"git can't list the files of .*index") as error:
        snapshot.take(script, run, ())
    assert str(tmp_path) in str(error.value.hint)


def test_a_later_start_brings_its_own_library(tmp_path: Path) -> None:
    """The batch script of a newer hpc-ddp calls parts that an older library does not have."""
    run = RunFolder(tmp_path / "train" / "20260101-000000-abcd").make()
    snapshot.carry_library(run)
    (run.lib / "hpc_ddp" / "node" / "batch.py").write_text("of an older version")
    task = RunFolder(run.path / "task-1").make()
    task.lib.symlink_to("../lib")
    snapshot.carry_library(task)
    assert (run.lib / "hpc_ddp" / "node" / "batch.py").read_text() == "of an older version"
    snapshot.carry_library(run)
    current = PACKAGE / "node" / "batch.py"
    assert (run.lib / "hpc_ddp" / "node" / "batch.py").read_text() == current.read_text()
    assert not list(run.path.glob(".lib*"))
