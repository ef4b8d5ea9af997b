"""The copy of hpc-ddp in a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.run_files.library import carry_library
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
