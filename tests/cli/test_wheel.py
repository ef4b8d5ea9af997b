"""The wheel as a user has it: outside of the checkout, in an environment without torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def _run(env: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ, HPC_DDP_RUNS=str(cwd / "runs"))
    environ.pop("PYTHONPATH", None)
    argv = [str(env / "bin" / words[0]), *words[1:]]
    return subprocess.run(argv, cwd=cwd, env=environ, capture_output=True, text=True)


def test_renders_with_its_own_templates(wheel_env: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    words = ("render", "--nodes", "2", "--fabric", "infiniband", "train.py")
    done = _run(wheel_env, "hpc-ddp", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "export NCCL_NET=IB" in done.stdout
    (lib,) = tmp_path.glob("runs/train/*/lib")
    assert (lib / "hpc_ddp" / "training" / "__init__.py").is_file()
    assert "slingshot" in (lib / "fabrics.json").read_text()


def test_has_the_jobs_and_no_torch(wheel_env: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util, pathlib, hpc_ddp;"
        "print(importlib.util.find_spec('torch'),"
        " pathlib.Path(hpc_ddp.__file__).with_name('jobs').joinpath('digits.py').is_file())"
    )
    done = _run(wheel_env, "python", "-c", code, cwd=tmp_path)
    assert done.stdout.split() == ["None", "True"], done.stderr


@pytest.mark.more  # slurm/test_submit.py submits so
def test_dry_run_with_a_torch_from_elsewhere(
    wheel_env: Path, torch_env: Path, tmp_path: Path
) -> None:
    script = Path(__file__).parents[1] / "slurm" / "scripts" / "plain.py"
    python = str(torch_env / "bin" / "python")
    done = _run(wheel_env, "hpc-ddp", "dry-run", "--python", python, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
