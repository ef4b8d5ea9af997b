"""Each setting has its origin: option, file, fabric or default."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission import plan
from hpc_ddp.submission.plan import Plan
from hpc_ddp.submission.restart import plan_continuation
from hpc_ddp.submission.settings import config, origin
from hpc_ddp.submission.settings.config import Settings


def test_settings_of_the_operators_file_have_their_origin(
    site_file: Path, planned: Callable[..., Plan], settings: Callable[..., Settings]
) -> None:
    site_file.write_text('account = "a"\n')
    rows = origin.find_origins(planned(), settings())
    assert {row.key: row.place for row in rows}["account"] == "~/etc/site.toml"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "hpc-ddp.toml").write_text(
        'script = "train.py"\ntime = "1:00:00"\nsetup = ["module load a"]\nfabric = '
        '"ethernet"\nsbatch = ["--network=x"]\n[env]\nA = "1"\nB = "1"\nNCCL_NET = "Socket"\n'
    )
    site = tmp_path / ".config" / "hpc-ddp" / "site.toml"
    site.parent.mkdir(parents=True)
    site.write_text(
        'account = "acc"\ntime = "2:00:00"\nsetup = ["module load b"]\n[env]\nC = "1"\n'
    )
    return folder


def _planned(project: Path, **options: Any) -> tuple[Plan, Settings]:
    settings = config.load(options, project, project.parent)
    return plan.plan_new(settings, project, project.parent / "runs"), settings


def test_each_setting_has_its_origin(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(project.parent))
    options = {"nodes": 2, "env": {"A": "2"}, "script": "train.py", "args": ["a b"]}
    rows = origin.find_origins(*_planned(project, **options, torchrun=["--numa-binding=node"]))
    site = "~/.config/hpc-ddp/site.toml"
    assert [(row.key, row.place, row.value) for row in rows] == [
        ("script", "command line", str(project / "train.py")),
        ("args", "command line", "a b"),
        ("job-name", "default", "train"),
        ("backend", "default", "slurm"),
        ("nodes", "--nodes", "2"),
        ("gpu-request", "default", "gpus-per-node"),
        ("time", "hpc-ddp.toml", "1:00:00"),
        ("account", site, "acc"),
        ("sbatch", "hpc-ddp.toml", "--network=x"),
        ("launcher", "default", "torchrun"),
        ("step-launcher", "default", "srun"),
        ("fabric", "hpc-ddp.toml", "ethernet"),
        ("setup", site, "module load b"),
        ("setup", "hpc-ddp.toml", "module load a"),
        ("python", "default", sys.executable),
        ("env.NCCL_NET", "hpc-ddp.toml", "Socket"),
        ("env.NCCL_IB_DISABLE", "fabric ethernet", "1"),
        ("env.C", site, "1"),
        ("env.A", "--env", "2"),
        ("env.B", "hpc-ddp.toml", "1"),
        ("chdir", "default", str(project)),
        ("signal", "default", "TERM@60"),
        ("continue-by", "default", "requeue"),
        ("max-failures", "default", "3"),
        ("warm-start", "default", "True"),
        ("torchrun", "--torchrun", "--numa-binding=node"),
    ]
    line = next(line for line in origin.table(rows).splitlines() if line.startswith("nodes"))
    assert line.split() == ["nodes", "--nodes", "2"]
    assert not (project.parent / "runs").exists()


def test_a_continued_run_keeps_its_settings(project: Path) -> None:
    settings = config.load({"nodes": 2}, project, project.parent)
    run = plan.plan_new(settings, project, project.parent / "runs").write().run
    options = {"time": "5"}
    settings = config.load(options, project, project.parent)
    planned = plan_continuation(run, options, settings, project)
    rows = {row.key: row for row in origin.find_origins(planned, settings)}
    assert (rows["time"].place, rows["nodes"].place) == ("--time", str(run.job_json))
    assert rows["signal"].place == "default"
    assert rows["nodes"].to_dict() == {
        **{"key": "nodes", "value": "2", "source": "run", "file": str(run.job_json)},
    }
    assert not (run.code / "1").exists()


def test_what_without_takes_out_has_no_row(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D", "1")
    with open(project / "hpc-ddp.toml", "a") as file:
        file.write(
            '[when.partition.p]\nwithout = ["--constraint=gpu", "module load a", "A", "B"]\n'
        )
    options = {"partition": "p", "constraint": "gpu", "env-names": ["D"]}
    rows = origin.find_origins(*_planned(project, **options))
    shown = {(row.key, row.value) for row in rows if row.key != "without"}
    assert ("env-names", "D") in shown  # it is passed on
    assert not {("constraint", "gpu"), ("setup", "module load a"), ("env.A", "1")} & shown
