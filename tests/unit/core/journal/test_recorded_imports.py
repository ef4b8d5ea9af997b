"""The imports of an attempt are written once, for the fork server of the later ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpc_ddp.core import process
from hpc_ddp.core.journal.recorded_imports import (
    FILE,
    drop_recorded_imports,
    record_imports,
    recorded_imports,
)
from hpc_ddp.core.process import ImportsAhead


def test_what_the_fork_server_had_not_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_imports(tmp_path)  # of a worker that is no fork
    assert list(tmp_path.iterdir()) == []
    ahead = frozenset(sys.modules) - {"pytest", "json", "hpc_ddp.core.process"}
    monkeypatch.setattr(process, "imports_ahead", ImportsAhead(1.0, 2.0, ahead, {}))
    record_imports(tmp_path)  # since then the environment has changed
    assert list(tmp_path.iterdir()) == []
    begun = {**os.environ, "TORCH_A": "1"}
    monkeypatch.setattr(process, "imports_ahead", ImportsAhead(1.0, 2.0, ahead, begun))
    record_imports(tmp_path)
    assert recorded_imports(tmp_path) == ["pytest"]  # the others are no installed packages
    monkeypatch.setattr(
        process, "imports_ahead", ImportsAhead(1.0, 2.0, frozenset(), dict(os.environ))
    )
    record_imports(tmp_path)
    assert recorded_imports(tmp_path) == ["pytest"]
    drop_recorded_imports(tmp_path)
    record_imports(tmp_path)
    assert recorded_imports(tmp_path) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"modules": 1}', '{"modules": [1, null]}'])
def test_a_damaged_record_has_no_imports(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert recorded_imports(tmp_path) == []


def test_a_disk_in_trouble_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        process, "imports_ahead", ImportsAhead(1.0, 2.0, frozenset(), dict(os.environ))
    )
    record_imports(tmp_path / "none")
    drop_recorded_imports(tmp_path / "none")
