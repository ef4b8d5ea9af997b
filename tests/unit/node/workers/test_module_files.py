"""Where Python would find a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.node.workers.module_files import find_hiding_file, is_installed


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [
        ("queue.py", True),
        ("queue.cpython-311-x86_64-linux-gnu.so", True),
        ("sitecustomize.py", True),
        ("queue.txt", False),
        ("__main__.py", False),
        ("train.py", False),
    ],
)
def test_a_file_hides_a_module(tmp_path: Path, name: str, is_hidden: bool) -> None:
    (tmp_path / name).touch()
    loaded = ["queue", "__main__", "torch.nn"]
    assert find_hiding_file([tmp_path / "none", tmp_path], loaded) == (
        tmp_path / name if is_hidden else None
    )


def test_a_folder_may_hide_what_is_looked_for_in_vain(tmp_path: Path) -> None:
    """A cloned repository is a package without an __init__.py."""
    folder = tmp_path / "opt_einsum"
    folder.mkdir()
    assert find_hiding_file([tmp_path], ["torch"], ["cuda"]) is None
    assert find_hiding_file([tmp_path], ["opt_einsum"]) is None
    assert find_hiding_file([tmp_path], ["torch"], ["opt_einsum"]) == folder


def test_packages_in_site_packages_are_installed() -> None:
    assert is_installed("numpy")
    assert not is_installed("json")
    assert not is_installed("no_such_module")
