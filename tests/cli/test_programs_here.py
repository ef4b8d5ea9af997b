"""Programs that are no script, and words that the job fills in, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_dry_run import DryRun

from hpc_ddp.cli.main import main

SHOW = """\
import json, os, sys
facts = {"argv": sys.argv, "path": sys.path[0], "env": dict(os.environ), "main": __file__}
with open(os.path.join(os.environ["OUT"], os.environ["RANK"] + ".json"), "w") as file:
    json.dump(facts, file)
"""
# Its agent imports torch, for seconds. A command under torchrun is that of the set-up lines.
LATER = pytest.param("torchrun", marks=pytest.mark.more)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package, a git work tree, in whose subfolder the commands are typed."""
    folder = tmp_path / "project" / "src"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "train.py").write_text("from package import part\n" + SHOW)
    (folder / "package" / "part.py").write_text("")
    (folder / "show.py").write_text(SHOW)
    (folder / "wrapper.sh").write_text('export LEVEL=$((RANK * 10))\nexec "$@"\n')
    (folder / "job").write_text("#SBATCH --nodes=2\nsrun python show.py\n")
    subprocess.run(["git", "init", "--quiet", folder.parent], check=True)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(folder)
    return folder


def _facts(tmp_path: Path, project: Path, *words: str, code: int = 0) -> list[dict[str, Any]]:
    """Play a job of two ranks in the project; return what each rank has seen."""
    options = ("--nproc-per-node", "2", "--max-failures", "0", "--chdir", str(project))
    job = DryRun(tmp_path / "runs", *options, *words, OUT=str(tmp_path / "out"))
    assert job.end() == code, job.printed()
    return [json.loads((tmp_path / "out" / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_module_runs_from_the_copy_of_the_code(tmp_path: Path, project: Path) -> None:
    words = ("--launcher", "srun", "-m", "package.train", "--lr", "$HOME")
    for facts in _facts(tmp_path, project, *words):
        assert facts["argv"][1:] == ["--lr", "$HOME"]
        assert facts["path"].endswith("/code/0/src")
        assert facts["main"].endswith("/code/0/src/package/train.py")


@pytest.mark.parametrize("launcher", ["srun", LATER])
def test_a_command_runs_with_the_variables_of_a_worker(
    tmp_path: Path, project: Path, launcher: str
) -> None:
    words = ("bash", "wrapper.sh", sys.executable, "show.py", "$RANK of ${WORLD_SIZE} at $HOME")
    expand = ("--expand", "RANK", "--expand", "WORLD_SIZE", "--expand", "SLURM_JOB_ID")
    env = ("--env", "NAME=r$RANK-$SLURM_JOB_ID", "--env", "ID=$SLURM_JOB_ID$HOME")
    options = ("--launcher", launcher, *expand, *env)
    for rank, facts in enumerate(_facts(tmp_path, project, *options, "--no-python", *words)):
        assert facts["argv"] == ["show.py", f"{rank} of 2 at $HOME"]
        assert facts["env"]["LEVEL"] == str(10 * rank)
        assert facts["env"]["NAME"] == f"r{rank}-0"
        assert facts["env"]["ID"] == "0$HOME"
        assert facts["env"]["PYTHONUNBUFFERED"] == "1"


def test_a_script_has_the_values_of_the_named_variables(tmp_path: Path, project: Path) -> None:
    """Its workers are forked."""
    script = str(project / "show.py")
    words = ("--expand", "LOCAL_RANK", script, "$LOCAL_RANK", "$$", "${local_rank}", "^a$b")
    for rank, facts in enumerate(_facts(tmp_path, project, *words)):
        assert facts["argv"][1:] == [str(rank), "$$", "${local_rank}", "^a$b"]


@pytest.mark.parametrize("launcher", ["srun", LATER])
def test_a_command_that_is_not_there_ends_the_run_with_its_name(
    tmp_path: Path, project: Path, launcher: str
) -> None:
    words = ("--launcher", launcher, "--max-failures", "0", "--no-python", "no-such-command")
    job = DryRun(tmp_path / "runs", *words)
    assert job.end() == 127
    assert "no-such-command can't be started: No such file or directory" in job.printed()


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["bash", "wrapper.sh"], "does not exist", "--no-python bash"),
        (["package.train"], "does not exist", "-m package.train"),
        (["--image", "a.sif", "/opt/t.py"], "does not exist", "--no-python python3 /opt/t.py"),
        (["wrapper.sh"], "is no Python script", "--no-python bash wrapper.sh"),
        (["job"], "is a script for sbatch", "hpc-ddp import job"),
        ([sys.executable], "is no Python script", f"--no-python ./{Path(sys.executable).name}"),
        (["-m", "package/train.py"], "is no module", "-m package.train"),
        (["-m", "--no-python", "bash"], "--module and --no-python exclude each other", "one of"),
        (["--torchrun=--no-python", "show.py"], "is set by hpc-ddp", "own --no-python"),
    ],
)
def test_a_wrong_program_is_refused_with_the_right_option(
    project: Path, words: list[str], message: str, hint: str
) -> None:
    result = CliRunner().invoke(main, ["render", "--runs-dir", str(project / "runs"), *words])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert hint in result.stderr


def test_a_missing_part_of_the_users_package_is_a_warning(project: Path) -> None:
    words = ["render", "--runs-dir", str(project / "runs"), "-m", "package.trian"]
    result = CliRunner().invoke(main, words)
    assert "there is package/" in result.stderr
    assert "no module package.trian" in result.stderr
    assert "/code/0" not in result.stdout  # it has to be installed, and needs no copy


def test_a_module_stands_in_the_project_file(project: Path) -> None:
    toml = 'script = "package.train"\nmodule = true\nargs = ["--x"]\n'
    (project / "hpc-ddp.toml").write_text(toml)
    runs = ["--runs-dir", str(project / "runs")]
    text = CliRunner().invoke(main, ["render", *runs]).stdout
    assert "/train/2" in text  # the job's name
    assert "program.py module " in " ".join(text.split())
    assert " package.train --x " in " ".join(text.split())
    script = " ".join(CliRunner().invoke(main, ["render", *runs, "show.py"]).stdout.split())
    assert "program.py" not in script  # the module of the file is not this program's
    assert "/src/show.py )" in script


@pytest.mark.parametrize("same_code", [True, False])
def test_a_module_is_run_again(tmp_path: Path, project: Path, same_code: bool) -> None:
    (project / "src").mkdir()  # is no copy of the folder that the module lies in
    launcher = "srun" if same_code else "torchrun"
    assert _facts(tmp_path, project, "--launcher", launcher, "-m", "package.train", "--x", "1")
    (run,) = (tmp_path / "runs").glob("train/*")
    env = {**os.environ, "OUT": str(tmp_path / "out"), "HPC_DDP_RUNS": str(tmp_path / "runs")}
    words = ["rerun", *(["--same-code"] if same_code else ["--launcher", "srun"])]
    words += ["--set", "x=2", str(run)]
    done = subprocess.run(
        [sys.executable, "-m", "hpc_ddp", *words], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "out" / "1.json").read_text())
    assert facts["argv"][1:] == ["--x=2"]
    assert facts["main"].endswith("/code/0/src/package/train.py")


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_set_up_lines_of_node_and_worker(tmp_path: Path, project: Path, launcher: str) -> None:
    """In the container, which `env` stands in for; what a worker's lines set is known to
    ``expand``, and a line that fails is reported and ends nothing."""
    count = f"echo $SLURM_PROCID >>{tmp_path}/nodes"
    node = ("--node-setup", count, "--node-setup", "export OF_NODE='a b'")
    worker = (
        "--worker-setup",
        "export NODE_RANK=$GROUP_RANK; [ $RANK = 0 ] || export DEBUG=r$RANK",
    )
    words = (*node, *worker, "--worker-setup", "false", "--expand", "OF_NODE", "--expand", "DEBUG")
    script: tuple[str, ...] = (str(project / "show.py"), "$OF_NODE")
    if launcher == "torchrun":  # a command, whose variables are those of a worker
        script = ("--no-python", "bash", "wrapper.sh", sys.executable, "show.py", "$OF_NODE")
    for rank, facts in enumerate(
        _facts(tmp_path, project, "--launcher", launcher, *words, *script)
    ):
        assert facts["argv"][1:] == ["a b"]
        assert facts["env"].get("LEVEL") == (str(10 * rank) if launcher == "torchrun" else None)
        assert (facts["env"]["NODE_RANK"], facts["env"].get("DEBUG")) == (
            "0",
            "r1" if rank else None,
        )
    assert len((tmp_path / "nodes").read_text().split()) == (1 if launcher == "torchrun" else 2)
    (log,) = (tmp_path / "runs").glob("*/*/logs/attempt-0/*/rank-1.log")
    assert "this set-up command failed with code 1: false" in log.read_text()
