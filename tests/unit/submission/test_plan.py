"""Planned runs on disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hpc_ddp.submission import backends, plan, snapshot
from hpc_ddp.submission.resources import PACKAGE
from hpc_ddp.submission.settings.config import Settings
from tests.raw_events import raw


def test_nothing_of_a_run_can_be_written_by_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner has the umask of a project's group, and so have the script and the package."""
    umask = os.umask(0o002)
    try:
        project = tmp_path / "project"
        (project / "part").mkdir(parents=True)
        (project / "part" / "more.py").write_text("")
        (project / "train.py").write_text("")
        package = tmp_path / "hpc_ddp"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (*package.rglob("*"), *project.rglob("*")):
            path.chmod(path.stat().st_mode | 0o020)
        monkeypatch.setattr(snapshot, "PACKAGE", package)
        settings = Settings({"script": "train.py"})
        run = plan.plan_new(settings, project, tmp_path / "runs").write()
        backends.render(run)
        run.run.journal("worker").write(raw("first_step", step=1))  # a worker has its user's umask
        assert os.umask(0o002) == 0o002
    finally:
        os.umask(umask)
    paths = [run.run.path, *run.run.path.rglob("*")]
    assert {run.run.script, run.run.lib / "node.py", run.code / "part" / "more.py"} <= {*paths}
    assert [path for path in paths if path.stat().st_mode & 0o022] == []
    for folder in (run.run.path.parent, run.run.root):
        assert not folder.stat().st_mode & 0o022
