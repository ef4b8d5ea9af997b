"""The folder of runs follows settings, environment and account."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.settings import config
from hpc_ddp.submission.settings.config import Settings
from hpc_ddp.submission.settings.runs_dir import run_of, runs_folder, runs_root


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({"runs-dir": "/a"}, {"HPC_DDP_RUNS": "/b", "SCRATCH": "/c"}, "/a"),
        ({"scratch": "/d"}, {"HPC_DDP_RUNS": "/b", "SCRATCH": "/c"}, "/b"),
        ({"scratch": "/d/{account}/$USER", "account": "p1"}, {"USER": "me"}, "/d/p1/me/hpc-ddp"),
        ({}, {"SCRATCH": "/c"}, "/c/hpc-ddp"),
        ({"runs-dir": "~/runs"}, {}, str(Path.home() / "runs")),
        ({"runs-dir": "/a$"}, {}, "/a$"),
        ({"runs-dir": "/x/{account}/a$", "account": "p1"}, {}, "/x/p1/a$"),
        ({}, {}, str(Path("runs").absolute())),
    ],
)
def test_the_folder_of_runs_follows_settings_and_environment(
    settings: dict[str, Any], environ: dict[str, str], expected: str
) -> None:
    assert runs_root(Settings(settings), environ) == Path(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [("/d/{account}", "no account is named"), ("$NOWHERE/x", "NOWHERE is not set here")],
)
def test_a_missing_account_or_variable_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        runs_root(Settings({"scratch": text}), {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [("nodes = [", "can't be read as TOML"), ("nodes = 2.5", "nodes is 2.5, but must be")],
)
@pytest.mark.parametrize("file", ["operators", "project", "user"])
def test_a_bad_settings_file_still_leads_to_the_runs(
    site_file: Path, file: str, text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home, cwd = site_file.parents[1], Path.cwd()
    user = home / ".config" / "hpc-ddp" / "site.toml"
    user.parent.mkdir(parents=True)
    paths = {"operators": site_file, "project": cwd / "hpc-ddp.toml", "user": user}
    for path in paths.values():
        path.write_text('scratch = "/s"\n')
    paths[file].write_text(text)
    with pytest.raises(UsageError, match=problem):
        config.load({}, cwd, home)
    assert runs_folder(None) == Path("/s/hpc-ddp")
    assert f"warning: {paths[file]}" in capsys.readouterr().err


def test_a_path_of_a_run_needs_no_settings(
    site_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(site_file.parents[1] / "runs" / "train" / "1").make()
    run.job_json.write_text("{}")
    site_file.write_text('scratch = "/scratch/{account}"\n')
    monkeypatch.delenv("HPC_DDP_RUNS", raising=False)
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    assert run_of(str(run.path), None) == run
    with pytest.raises(UsageError, match="no account is named"):
        run_of("1", None)


def test_without_a_text_the_newest_run_is_meant(tmp_path: Path) -> None:
    root = str(tmp_path / "runs")
    with pytest.raises(UsageError, match="there are no runs in"):
        run_of(None, root)
    for name in ("20260101-000000-aaaa", "20260102-000000-aaaa"):
        run = RunFolder(tmp_path / "runs" / "train" / name).make()
        run.job_json.write_text("{}")
    assert run_of(None, root) == run


def test_a_folder_above_is_named_without_dots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's mounts are compared by their names."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    assert runs_root(Settings({"runs-dir": "../runs"})) == tmp_path.resolve() / "runs"
