"""The copy of hpc-ddp in a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.run_files.library import carry_library, close_code
from tests.page_blocks import REPO


def test_operators_read_how_many_files_it_has(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()
    carry_library(run)
    files = [path for path in run.lib.rglob("*") if path.is_file()]
    match = re.search(
        r"(\d+) files of hpc-ddp \(([\d.]+) MB", (REPO / "docs" / "for-admins.md").read_text()
    )
    assert match
    assert len(files) == pytest.approx(int(match[1]), rel=0.1)
    assert sum(path.stat().st_size for path in files) / 1e6 == pytest.approx(
        float(match[2]), rel=0.2
    )


def test_a_copy_of_code_that_can_not_be_written_needs_no_folder_for_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "helper.py").touch(0o666)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    close_code(tmp_path)
    assert not (tmp_path / "helper.py").stat().st_mode & 0o022


def test_bytecode_lies_in_folders_that_no_group_can_write(tmp_path: Path) -> None:
    """The workers have the user's umask, which is 002 where each user has a group."""
    run = RunFolder(tmp_path / "name" / "id").make()
    carry_library(run)
    code = run.code / "0"
    (code / "package").mkdir(parents=True)
    for name in ("helper.py", "package/__init__.py"):
        (code / name).touch()
    close_code(code)
    programs = ["import package, helper", "import hpc_ddp.core.run_folder"]
    for folder, program in zip((code, run.lib), programs, strict=True):
        env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
        argv = ["bash", "-c", 'umask 002; exec "$@"', "bash", sys.executable, "-c", program]
        subprocess.run(argv, env=env, cwd=tmp_path, check=True)
        assert [*folder.rglob("*.pyc")]
        open_paths = [path for path in folder.rglob("*") if path.stat().st_mode & 0o022]
        assert open_paths == []


def test_a_worker_can_call_the_installed_commands(tmp_path: Path) -> None:
    """As a script that submits the next job; a run carries no commands."""
    run = RunFolder(tmp_path / "name" / "id").make()
    carry_library(run)
    code = tmp_path / "code"
    code.mkdir()
    env = {**os.environ, "HPC_DDP_CODE": str(code), "PYTHONPATH": f"{run.lib}:{code}:{REPO}"}
    script = Path(sys.executable).with_name("hpc-ddp")
    for argv in ([sys.executable, "-m", "hpc_ddp"], [sys.executable, str(script)]):
        done = subprocess.run([*argv, "--version"], env=env, cwd=tmp_path, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b""), done.stderr
        assert done.stdout.startswith(b"hpc-ddp")
    look = "import hpc_ddp.cli, os; print(os.environ['PYTHONPATH'], hpc_ddp.cli.__file__)"
    done = subprocess.run([sys.executable, "-c", look], env=env, cwd=tmp_path, capture_output=True)
    assert done.stdout.decode().split() == [str(REPO), str(REPO / "hpc_ddp/cli/__init__.py")]
    env["PYTHONPATH"] = str(run.lib)
    look = "import sys; sys.path = [p for p in sys.path if 'python3' in p or p == sys.argv[1]]"
    argv = [sys.executable, "-S", "-c", f"{look}\nimport hpc_ddp.cli", str(run.lib)]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True)
    assert b"error: hpc-ddp is not installed for " in done.stderr
