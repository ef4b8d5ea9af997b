"""A run that can't be started leaves things as they were."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.cli import jobs
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission import backends, snapshot
from hpc_ddp.submission.plan import PreparedRun


def raise_error(*args: Any, **options: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedRun:
    run = RunFolder(tmp_path / "train" / "20260101-000000-abcd").make()
    return PreparedRun(JobSpec("train.py"), run, tmp_path, tmp_path / "train.py", is_new=True)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_full_disk_leaves_no_new_run_behind(
    prepared: PreparedRun, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    monkeypatch.setattr(backends, "render", raise_error)
    with pytest.raises(OSError, match="No space left"):
        backends.start(replace(prepared, is_new=is_new))
    assert prepared.run.path.exists() is not is_new


def test_a_fresh_start_that_fails_gives_the_checkpoints_back(
    prepared: PreparedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[Any] = []
    monkeypatch.setattr(jobs, "set_aside", lambda prepared: ["aside-0"])
    monkeypatch.setattr(jobs, "bring_back", given_back.extend)
    monkeypatch.setattr(backends, "start", raise_error)
    with pytest.raises(OSError, match="No space left"):
        jobs._begin(prepared, fresh=True)
    assert given_back == ["aside-0"]


def test_a_broken_git_index_is_named(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / ".git" / "index").write_text("x")
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    with pytest.raises(UsageError, match=r"git can't list the files of .*index") as error:
        snapshot.take(script, run, ())
    assert str(tmp_path) in str(error.value.hint)
