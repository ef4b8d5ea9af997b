"""Warnings of a submit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission import plan
from hpc_ddp.submission.script.mistakes import find_mistakes
from hpc_ddp.submission.settings.config import Settings


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({"args": ["$HOME/x"]}, "$HOME stays as it is"),
        ({"args": ["$HOME/x"], "expand": ["HOME"]}, ""),
        ({"env": {"A": "$(date)"}}, "$( stays as it is"),
        ({"args": ["^a$", "5$"]}, ""),
        ({"args": ["-c", "echo $X"], "script": "bash", "no-python": True}, ""),
        ({"args": ["$X/o"], "script": "composer", "no-python": True}, "$X stays as it is"),
        ({"container": "apptainer exec $X/a.sif"}, "$X stays as it is"),
        ({"resume-args": "--from $X"}, "$X stays as it is"),
        ({"array": "0-9%1"}, "runs that begin anew each"),
        ({"array": "0-9%2"}, ""),
        (
            {"env": {"GLOO_SOCKET_IFNAME": "lo"}, "nodes": 2},
            "GLOO_SOCKET_IFNAME is lo",
        ),
        ({"env": {"NCCL_SOCKET_IFNAME": "=lo"}, "nodes": "1-4"}, "NCCL_SOCKET_IFNAME is lo"),
        ({"env": {"GLOO_SOCKET_IFNAME": "lo"}}, ""),
        ({"env": {"GLOO_SOCKET_IFNAME": "ib0"}, "nodes": 2}, ""),
        ({"script": "empty.py"}, "empty.py is empty"),
        ({"image": "none.sif"}, "image none.sif is not on this machine"),
        ({"image": "/none/a"}, "image /none/a is not on this machine"),
        ({"image": "/none/a", "container-tool": "pyxis"}, "image /none/a is not"),
        ({"image": "$SCRATCH/a.sif", "expand": ["SCRATCH"]}, ""),
        ({"image": "docker://ubuntu:24.04"}, ""),
        ({"image": "nvidia/cuda", "container-tool": "pyxis"}, ""),
        ({"image": "there.sif"}, ""),
        ({"python": "~nosuchuser/bin/python"}, "python ~nosuchuser/bin/python names no user"),
        ({"script": "nosuchcommand", "no-python": True}, "no command nosuchcommand"),
        ({"script": "./none.sh", "no-python": True}, "no command ./none.sh"),
        ({"script": "./there.sh", "no-python": True}, ""),
        ({"script": "nosuchcommand", "no-python": True, "setup": ["module load x"]}, ""),
        ({"script": "nosuchcommand", "no-python": True, "image": "there.sif"}, ""),
        ({"script": "nosuch.module", "module": True}, "no module nosuch, neither in"),
        ({"script": "nosuch.module", "module": True, "env": {"PYTHONPATH": "/x"}}, ""),
        ({"script": "json.tool", "module": True}, ""),
    ],
)
def test_what_may_be_meant_otherwise_is_said(
    tmp_path: Path, values: dict[str, Any], warning: str
) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "empty.py").touch()
    (tmp_path / "there.sif").touch()
    (tmp_path / "there.sh").touch(mode=0o755)
    settings = Settings({"script": "train.py", "python": sys.executable, **values})
    mistakes = find_mistakes(plan.plan_new(settings, tmp_path, tmp_path / "runs").spec)
    assert warning in "".join(mistakes)
    assert bool(warning) == bool(mistakes)
