"""Fabrics as data, for the node side."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpc_ddp.submission.package_files import folder
from hpc_ddp.submission.settings.fabric_profiles import fabric_env, read_auto_profiles
from unit.node.fakes import write_lib

FILES = sorted((folder("templates") / "fabrics").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_fabric_names_its_sources_with_a_date(path: Path) -> None:
    text = path.read_text()
    env = fabric_env(path.stem)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]+", name) and value for name, value in env.items())
    assert not env or ("https://" in text and "2026-" in text)


def test_fabrics_of_a_run_are_read_without_toml(tmp_path: Path) -> None:
    table = json.loads((write_lib(tmp_path) / "fabrics.json").read_text())
    assert table == read_auto_profiles()
    assert "roce" not in table
    assert "slingshot" in table
