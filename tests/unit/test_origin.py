"""The origins of a script's lines."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_render import CASES

from hpc_ddp.launch import config, origin, prepare
from hpc_ddp.launch.config import Settings
from hpc_ddp.launch.prepare import Prepared
from hpc_ddp.report.tables import show_origins
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.spec import JobSpec


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "hpc-ddp.toml").write_text(
        'script = "train.py"\ntime = "1:00:00"\nsetup = ["module load a", "x\\ny"]\nfabric = '
        '"ethernet"\nsbatch = ["--network=x"]\n[env]\nA = "1"\nB = "1"\nNCCL_NET = "Socket"\n'
    )
    site = tmp_path / ".config" / "hpc-ddp" / "site.toml"
    site.parent.mkdir(parents=True)
    site.write_text('account = "acc"\ntime = "2:00:00"\ntemplate = "group.j2"\n[env]\nC = "1"\n')
    (site.parent / "group.j2").write_text(
        "{% extends 'job.sbatch.j2' %}\n{% block verdict %}\necho {{ run | q }}\n"
        "{{ super() }}{% endblock %}\n"
    )
    return folder


def _planned(project: Path, **options: Any) -> tuple[Prepared, Settings]:
    settings = config.load(options, project, project.parent)
    return prepare.planned_run(settings, project, project.parent / "runs"), settings


def _labels(prepared: Prepared, settings: Settings) -> dict[str, str]:
    return {line.text.strip(): line.label for line in origin.explained(prepared, settings)}


def test_each_line_has_its_origin(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(project.parent))
    options = {"nodes": 2, "env": {"A": "2"}, "script": "train.py", "args": ["a b"]}
    labels = _labels(*_planned(project, **options, torchrun=["--numa-binding=node"]))
    expected = {
        "#!/bin/bash": "hpc-ddp",
        "#SBATCH --job-name=train": "default: job-name",
        "#SBATCH --nodes=2": "--nodes",
        "#SBATCH --time=1:00:00": "hpc-ddp.toml: time",
        "#SBATCH --account=acc": "~/.config/hpc-ddp/site.toml: account",
        "#SBATCH --network=x": "hpc-ddp.toml: sbatch",
        "#SBATCH --open-mode=append": "hpc-ddp: keeps the log over a requeue",
        "#SBATCH --comment=hpc-ddp/0.1.0": "hpc-ddp: finds its jobs in squeue",
        "#SBATCH --requeue": "default: continue-by",
        "export HPC_DDP_HOST_SUFFIX='' HPC_DDP_INTERFACE=''": "default: host-suffix, interface",
        "export A=2": "--env",
        "export B=1": "hpc-ddp.toml: env",
        "export C=1": "~/.config/hpc-ddp/site.toml: env",
        "export NCCL_NET=Socket": "hpc-ddp.toml: env",
        "export NCCL_IB_DISABLE=1": "fabric ethernet: env",
        "module load a": "hpc-ddp.toml: setup",
        "x": "hpc-ddp.toml: setup",
        "y": "hpc-ddp.toml: setup",
        'eval "$attempt"': "hpc-ddp: block attempt",
        "--nproc-per-node=1": "default: gpus-per-node",
        "--numa-binding=node": "--torchrun",
        "'a b'": "command line",
        '"${node_side[@]}" batch verdict': "hpc-ddp: block verdict",
    }
    assert {text: labels.get(text) for text in expected} == expected
    (echo,) = (text for text in labels if text.startswith("echo /"))
    assert labels[echo] == "~/.config/hpc-ddp/group.j2: block verdict"
    assert not (project.parent / "runs").exists()


@pytest.mark.parametrize("name", CASES)
def test_an_explained_script_is_the_script(name: str, tmp_path: Path) -> None:
    spec = JobSpec(**{"script": "/home/me/train.py", "workdir": "/home/me", **CASES[name]})
    script = Path(spec.script)
    prepared = Prepared(spec, RunFolder(tmp_path / "run"), script.parent, script, True)
    lines = origin.explained(prepared, Settings({}))
    assert "".join(f"{line.text}\n" for line in lines) == prepared.rendering.whole()
    assert all(line.origins for line in lines)
    sources = {each.source for line in lines for each in line.origins}
    assert sources <= {"hpc-ddp", "default", "fabric"}


def test_what_a_template_does_with_values_can_not_break_it(project: Path) -> None:
    own = project / "own.j2"
    own.write_text(
        "{% extends 'job.sbatch.j2' %}{% block setup %}{{ (run ~ '/x y') | q }} {{ run[1:3] }}"
        " {{ code | length }}\n{% endblock %}"
    )
    prepared, settings = _planned(project, template=str(own))
    (line,) = (each for each in origin.explained(prepared, settings) if "x y'" in each.text)
    assert line.text in prepared.rendering.whole()
    assert line.origins[0].source == "template"
    # A value that is cut to a length would lose its mark: then each line has its block.
    own.write_text(
        "{% extends 'job.sbatch.j2' %}{% block setup %}{{ (run ~ '') | truncate(9) }}\n"
        "{% endblock %}"
    )
    prepared, settings = _planned(project, template="own.j2")
    lines = origin.explained(prepared, settings)
    assert "".join(f"{line.text}\n" for line in lines) == prepared.rendering.whole()
    assert {each.source for line in lines for each in line.origins} == {"hpc-ddp", "template"}


def test_on_a_terminal_a_long_line_stays_in_its_column() -> None:
    rows = [("option", "--nodes", "n" * 70), ("option", "--nodes", ""), ("default", "x", "y")]
    for terminal, lines in ((True, 4), (False, 3)):
        shown = io.StringIO()
        show_origins(
            rows, Console(file=shown, width=60, force_terminal=terminal, color_system=None)
        )
        printed = shown.getvalue().splitlines()
        assert len(printed) == lines
        assert printed[0].startswith("--nodes  nnn")
        assert printed[-1] == "x        y"
