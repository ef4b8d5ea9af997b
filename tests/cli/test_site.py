"""hpc-ddp site, where there is no Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpc_ddp.cli.main import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _site(*words: str) -> Result:
    return CliRunner().invoke(main, ["site", *words])


def test_detect_without_a_slurm_says_so(home: Path) -> None:
    done = _site("detect")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "this machine has no Slurm client" in done.stderr
    assert "hint: log in to the cluster first" in done.stderr
    assert not list(home.iterdir())


def test_list_and_show(home: Path) -> None:
    assert "* generic" in _site("list").stdout
    own = home / ".config" / "hpc-ddp" / "site.toml"
    own.parent.mkdir(parents=True)
    own.write_text('account = "mine"\n')
    assert f"* site             {own}" in _site("list").stdout
    shown = _site("show").stdout
    assert shown.startswith(f'# --- {own}\naccount = "mine"\n')
    assert shown.index(str(own)) < shown.index("generic.toml")
    done = _site("show", "nowhere")
    assert done.exit_code == 2
    assert "site 'nowhere' is unknown" in done.stderr
