"""Scripts and their folders are copied into the run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission import snapshot


def test_a_broken_git_index_is_named(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / ".git" / "index").write_text("x")
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    with pytest.raises(UsageError, match=r"git can't list the files of .*index") as error:
        snapshot.take(script, run, ())
    assert str(tmp_path) in str(error.value.hint)
