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


def test_some_modules_are_never_imported_ahead() -> None:
    assert is_installed("numpy")
    assert not is_installed("mpi4py")
    assert not is_installed("json")
    assert not is_installed("no_such_module")
