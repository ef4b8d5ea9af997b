"""Names for the Tab key."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_ddp.cli import completing
from hpc_ddp.cli.completing import runs
from hpc_ddp.cli.main import main
from hpc_ddp.core.run_folder import RunFolder


def test_names_that_a_shell_would_read_are_not_offered(tmp_path: Path, run: RunFolder) -> None:
    (run.root / "best;id>PWNED;#").mkdir()
    (run.root / "train" / "$(id)").mkdir()
    parent = main.make_context("hpc-ddp", ["status"], resilient_parsing=True)
    parent.params["runs_dir"] = str(run.root)
    assert [suggestion.value for suggestion in runs(parent, "")] == [
        "train",
        "20260101-000000-abcd",
    ]


def test_a_folder_that_is_closed_hides_no_other_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_folder(path: os.DirEntry[str]) -> list[str]:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", path.path)
        return os.listdir(path)

    for name in ("closed", "zebra"):
        (run.root / name / "20260102-000000-abcd").mkdir(parents=True)
    parent = main.make_context("hpc-ddp", ["status"], resilient_parsing=True)
    parent.params["runs_dir"] = str(run.root)

    def scan(path: Path) -> list[os.DirEntry[str]]:
        return sorted(os.scandir(path), key=lambda entry: entry.name)

    monkeypatch.setattr(completing, "os", SimpleNamespace(scandir=scan, listdir=list_folder))
    assert [suggestion.value for suggestion in runs(parent, "z")] == ["zebra"]
