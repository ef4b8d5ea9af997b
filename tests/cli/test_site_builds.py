"""The documentation is a site: every page, link and docstring that it is made of is there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.skips import skip_or_fail

REPO = Path(__file__).parents[2]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None:  # `make version` installs no extra of that name
        skip_or_fail("mkdocs is not installed")
    argv = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    env = dict(os.environ, NO_MKDOCS_2_WARNING="1")
    done = subprocess.run(argv, cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in (
        "hpc_ddp.api.submit",
        "hpc_ddp.core.job.options.JobSpec",
        "hpc_ddp.training.process.start.start",
    ):
        assert f'id="{name}"' in page
    first = (tmp_path / "site" / "first-job" / "index.html").read_text()
    assert "fonts.googleapis" not in first
