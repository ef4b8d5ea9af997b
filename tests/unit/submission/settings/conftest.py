from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission import plan
from hpc_ddp.submission.plan import Plan
from hpc_ddp.submission.settings import config, operators
from hpc_ddp.submission.settings.config import Settings


@pytest.fixture
def site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for ``/etc/hpc-ddp/site.toml``; beside it a home, and a project with a script."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(operators.VARIABLE, raising=False)
    path = tmp_path / "etc" / "site.toml"
    path.parent.mkdir()
    monkeypatch.setattr(operators, "SITE_FILE", path)
    return path


@pytest.fixture
def settings(site_file: Path) -> Callable[..., Settings]:
    def load(**options: Any) -> Settings:
        keys = {key.replace("_", "-"): value for key, value in options.items()}
        return config.load({"script": "train.py"} | keys, Path.cwd(), site_file.parents[1])

    return load


@pytest.fixture
def planned(settings: Callable[..., Settings]) -> Callable[..., Plan]:
    return lambda **options: plan.plan_new(settings(**options), Path.cwd(), Path("/runs"))
