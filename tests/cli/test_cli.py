"""The command line as typed, without a cluster: messages, exit codes, what goes where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from hpc_ddp.cli.click_options import OTHERS, group_of
from hpc_ddp.cli.main import COMMANDS
from hpc_ddp.cli.main import main as cli
from tests.command_line import call_here

REPO = Path(__file__).parents[2]
Cli = Callable[..., subprocess.CompletedProcess[str]]


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a script, and a PATH without Slurm."""
    (tmp_path / "bin").mkdir()
    for name in ("git", "bash"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text("print('hello')\n")
    return tmp_path / "work"


@pytest.fixture
def run_cli(project: Path) -> Cli:
    def call(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(project.parent / "bin"), "HOME": str(project.parent)}
        env |= {"HPC_DDP_RUNS": str(project.parent / "runs"), **environ}
        return call_here(project, env, *words)

    return call


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*")) if folder.exists() else []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", "gone.py"], "gone.py' does not exist"),
        (["submit", "."], "is a folder; accepted: a file of Python"),
        (["submit"], "no script is named"),
        (["submit", "--nodes", "0", "train.py"], "nodes is 0; accepted: a whole number from 1"),
        (["submit", "--nodes", "4-1", "train.py"], "or a range of them, as 1-4"),
        (["submit", "--torchrun=--nnodes=3", "train.py"], "--nnodes is set by hpc-ddp"),
        (["submit", "--backend", "slrum", "train.py"], "did you mean 'slurm'?"),
        (["submit", "--fabric", "ether", "train.py"], "accepted: auto, efa, ethernet, infiniband"),
        (["submit", "--site", "nowhere", "train.py"], "site 'nowhere' is unknown"),
        (["submit", "--template", "gone.j2", "train.py"], "gone.j2' does not exist"),
        (["submit", "--env", "NOT_SET", "train.py"], "NOT_SET is not set here"),
        (["submit", "--env", "HF_TOKEN=x", "train.py"], "looks like a secret"),
        (["submit", "--env", "MLFLOW_TRACKING_URI=http://me:word@h", "train.py"], "like a secret"),
        (["submit", "--run", "nope", "train.py"], "no run 'nope'"),
        (["submit", "--fresh", "train.py"], "--fresh needs --run RUN"),
        (["submit", "--force", "train.py"], "--force needs --run RUN"),
        (["submit", "--backend", "salloc", "train.py"], "this shell is in none"),
        (["preflight"], "this shell is in none"),
        (["sweep", "train.py"], "a sweep without a parameter is no sweep"),
        (["sweep", "--set", "lr=1", "--array", "0-1", "train.py"], "is an array of its own"),
        (["submit", "--time", "soon", "train.py"], "not a Slurm time"),
        (
            ["submit", "--signal", "SIGKILL@9", "train.py"],
            "accepted names: TERM, INT, HUP, USR1, USR2",
        ),
        (["submit", "--gpu-request", "gpu", "train.py"], "accepted: gpus-per-node, gres"),
        (
            ["submit", "--step-launcher", "mpirun", "--launcher", "srun", "train.py"],
            "excludes --launcher srun",
        ),
        (["submit", "--chdir", "gone", "train.py"], "gone' does not exist"),
        (["submit", "--image", "a.sif", "--container", "b", "train.py"], "two ways to say"),
        (["submit", "--runs-dir", "/proc/x", "train.py"], "can't be written"),
        (["logs", "nope"], "no run 'nope'"),
        (["cancel", "nope"], "no run 'nope'"),
        (["status", "nope"], "no run 'nope'"),
    ],
)
def test_usage_errors(run_cli: Cli, project: Path, words: list[str], message: str) -> None:
    done = run_cli(*words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert _names(project.parent / "runs") == []


def test_without_a_slurm_submit_says_so(run_cli: Cli, project: Path) -> None:
    for backend in ("slurm", "submitit"):
        done = run_cli("submit", "--backend", backend, "train.py")
        assert done.returncode == 1
        assert "this machine has no Slurm client" in done.stderr
        assert "Traceback" not in done.stderr
        assert _names(project.parent / "runs") == []


def test_render_prints_the_script_alone_and_keeps_it(run_cli: Cli) -> None:
    done = run_cli("render", "--nodes", "2", "train.py", "--nodes", "9")
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --nodes=2\n")
    (kept,) = (line.split(" ", 1)[1] for line in done.stderr.splitlines() if "run: " in line)
    assert Path(kept, "job.sbatch").read_text() == done.stdout
    told = json.loads(run_cli("render", "--json", "train.py").stdout)
    assert Path(told["run"]).is_dir()


def test_explain_shows_where_settings_are_set_and_leaves_nothing_behind(
    run_cli: Cli, project: Path
) -> None:
    words = ("--nodes", "2", "train.py")
    done = run_cli("render", "--explain", *words)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^nodes +--nodes +2$", done.stdout, re.M)
    assert re.search(r"^signal +default +TERM@60$", done.stdout, re.M)
    rows = json.loads(run_cli("render", "--explain", "--json", *words).stdout)
    assert {"key": "nodes", "value": "2", "source": "option"} in rows
    assert _names(project.parent / "runs") == []


def test_a_template_of_a_site_file(run_cli: Cli, project: Path) -> None:
    site = project.parent / ".config" / "hpc-ddp"
    site.mkdir(parents=True)
    (site / "site.toml").write_text('template = "group.j2"\n')
    (site / "group.j2").write_text(
        "{% extends 'job.sbatch.j2' %}\n{% block verdict %}\ntrue\n{% endblock %}\n"
    )
    done = run_cli("render", "train.py")
    assert done.stdout.endswith("\ntrue\n")
    assert "warning: the template leaves out 'batch verdict': nothing requeues" in done.stderr
    (site / "group.j2").write_text("{% extends 'job.sbatch.j2' %}\n{% block stp %}{% endblock %}")
    done = run_cli("render", "train.py")
    assert done.returncode == 2
    assert f"{site / 'group.j2'}, line 2: job.sbatch.j2 has no block 'stp'" in done.stderr


def test_project_file_and_site_file_and_flag(run_cli: Cli, project: Path) -> None:
    (project / "hpc-ddp.toml").write_text(
        'script = "train.py"\nnodes = 3\npartition = "mine"\n[env]\nA = "1"\nB = "1"\n'
    )
    site = project.parent / ".config" / "hpc-ddp"
    site.mkdir(parents=True)
    (site / "site.toml").write_text(
        'account = "acc"\npartition = "theirs"\n[env]\nB = "2"\nC = 2\n'
    )
    text = run_cli("render", "--nodes", "2", "--env", "A=flag").stdout
    for line in ("--nodes=2", "--partition=mine", "--account=acc"):
        assert f"#SBATCH {line}\n" in text
    for line in ("A=flag", "B=1", "C=2"):
        assert f"export {line}\n" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodse = 2", "unknown key 'nodse', did you mean 'nodes'?"),
        ("nodes = [2]", "nodes is [2], but must be a whole number, or a range"),
        ("nodes = true", "must be a whole number"),
        ("setup = [1]", "must be a list of strings"),
        ("nodes = ", "can't be read as TOML"),
        ('env = {A = ["\\u0000"]}', "a text has a NUL"),
    ],
)
def test_a_wrong_project_file(run_cli: Cli, project: Path, text: str, message: str) -> None:
    (project / "hpc-ddp.toml").write_text(text + "\n")
    done = run_cli("submit", "train.py")
    assert done.returncode == 2
    assert message in done.stderr
    assert "hpc-ddp.toml" in done.stderr


def test_snapshot_of_a_git_tree(run_cli: Cli, project: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".gitignore").write_text("ignored\n")
    for name in ("ignored", "kept", "with space é"):
        (project / name).write_text(name)
    (project / "link").symlink_to("kept")
    (project / "my runs" / "old").mkdir(parents=True)
    (project / "my runs" / "old" / "checkpoint").write_text("not code, though nobody ignores it")
    told = json.loads(run_cli("render", "--json", "--runs-dir", "my runs", "train.py").stdout)
    code = Path(told["run"], "code", "0")
    names = {path.name for path in code.iterdir()}
    assert names == {".gitignore", "__pycache__", "kept", "link", "train.py", "with space é"}
    assert (code / "link").is_symlink()


def test_too_large_a_snapshot_names_the_largest(run_cli: Cli, project: Path) -> None:
    with open(project / "big.raw", "wb") as file:
        file.truncate(60 * 10**6)
    done = run_cli("submit", "train.py")
    assert done.returncode == 2
    assert "big.raw (60.0 MB)" in done.stderr
    assert "snapshot-exclude" in done.stderr
    (project / "hpc-ddp.toml").write_text('snapshot-exclude = ["*.raw"]\n')
    assert run_cli("render", "train.py").returncode == 0
    (project / "hpc-ddp.toml").unlink()
    done = run_cli("render", "--no-snapshot", "train.py")
    assert f"export HPC_DDP_CODE={project}\n" in done.stdout


def test_a_look_at_the_script_of_a_run_changes_no_run(run_cli: Cli) -> None:
    path = json.loads(run_cli("render", "--json", "train.py").stdout)["run"]
    files = {name: Path(path, name).read_bytes() for name in ("job.json", "job.sbatch")}
    done = run_cli("render", "--run", path, "--time", "5:00", "train.py")
    assert "#SBATCH --time=5:00" in done.stdout
    assert "submit by hand" not in done.stderr
    assert {name: Path(path, name).read_bytes() for name in files} == files
    assert not Path(path, "code", "1").exists()


def test_the_checkpoints_of_an_array_are_those_of_its_tasks(run_cli: Cli) -> None:
    path = json.loads(run_cli("render", "--json", "--array", "0-1", "train.py").stdout)["run"]
    Path(path, "task-1", "checkpoints", "step-3").mkdir(parents=True)
    done = run_cli("verify", path)
    assert done.returncode == 1
    assert "task-1/step-3" in done.stdout
    done = run_cli("logs", path, "--rank", "0")
    assert "is an array; accepted with --rank: a task of it" in done.stderr
    assert f"hint: hpc-ddp logs {path}/task-0 --rank 0" in done.stderr


def test_status_of_nothing_and_of_a_rendered_run(run_cli: Cli) -> None:
    done = run_cli("status")
    assert (done.returncode, done.stdout) == (0, "")
    run_cli("render", "train.py")
    assert "never submitted" in run_cli("status").stdout
    assert json.loads(run_cli("status", "--json").stdout)[0]["state"] == "rendered"


def test_the_options_are_these() -> None:
    """A new option is a decision: it needs a user, and a line in this list."""
    options = {o for p in command("submit").params for o in p.opts if o.startswith("--")}
    assert options == {
        *("--account", "--array", "--backend", "--budget-gpu-hours", "--constraint", "--container"),
        *(
            "--continue-by",
            "--notify",
            "--force",
            "--fresh",
            "--new-code",
            "--resume-args",
            "--resume-if",
        ),
        *(
            "--cpus-per-node",
            "--cpus-per-task",
            "--dependency",
            "--env",
            "--exclude",
            "--exclusive",
            "--fabric",
        ),
        *("--gpus-per-node", "--interface", "--job-name", "--json", "--launcher"),
        *("--mail-type", "--mail-user", "--mpirun", "--output", "--error"),
        *(
            "--module",
            "--no-python",
            "--expand",
            "--container-options",
            "--node-setup",
            "--worker-setup",
        ),
        *("--max-failures", "--max-requeues", "--mem", "--no-snapshot", "--nodelist", "--nodes"),
        *(
            "--nproc-per-node",
            "--time-min",
            "--partition",
            "--preflight",
            "--python",
            "--qos",
            "--reservation",
            "--run",
        ),
        *("--elastic", "--max-restarts", "--no-warm-start", "--torchrun"),
        *("--chdir", "--gpu-request", "--image", "--signal", "--step-launcher"),
        *(
            "--runs-dir",
            "--sbatch",
            "--setup",
            "--site",
            "--srun",
            "--stage",
            "--template",
            "--time",
        ),
    }


def test_every_job_option_has_a_heading() -> None:
    options = [p for p in command("submit").params if isinstance(p, click.Option)]
    assert {option.name for option in options if group_of(option) == OTHERS} == {"as_json"}


def test_the_help_of_submit_fits_two_screens(run_cli: Cli) -> None:
    lines = run_cli("submit", "--help").stdout.splitlines()
    assert len(lines) <= 120
    assert lines.index("Common options:") < 10


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_stands_in_the_reference(name: str, run_cli: Cli) -> None:
    done = run_cli(name, "--help")
    assert done.returncode == 0
    assert command(name).help
    reference = Path(__file__).parents[2] / "docs" / "reference.md"
    assert f"### hpc-ddp {name}" in reference.read_text()


def test_an_unknown_option_is_a_usage_error(run_cli: Cli) -> None:
    done = run_cli("submit", "--nodse", "2", "train.py")
    assert done.returncode == 2
    assert "--nodes" in done.stderr
    done = run_cli("site", "--bogus")
    assert done.returncode == 2
    assert "SCRIPT" not in done.stderr


def test_a_locale_without_a_character_is_no_traceback(project: Path) -> None:
    argv = [sys.executable, "-m", "hpc_ddp", "submit", "--help"]
    env = os.environ | {"PYTHONIOENCODING": "iso8859-1"}
    ended = subprocess.run(argv, cwd=project, env=env, capture_output=True, check=True)
    assert b"Traceback" not in ended.stderr
    assert ended.stdout.count(b"?")


def test_a_pipe_that_closes_early_is_no_traceback(project: Path) -> None:
    env = dict(os.environ, HPC_DDP_RUNS=str(project.parent / "runs"))
    command = f"{sys.executable} -m hpc_ddp render train.py | head -1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=project, env=env, capture_output=True, text=True
    )
    assert done.stdout == "#!/bin/bash\n"
    assert "Traceback" not in done.stderr


def test_what_is_seen_here_already_is_said(run_cli: Cli, project: Path) -> None:
    (project / "bad.py").write_text("x = (\n")
    done = run_cli("render", "--python", "/nope/python", "bad.py", "--nodes", "3")
    assert done.returncode == 0
    assert "note: --nodes stands behind bad.py, so it goes to the script" in done.stderr
    assert "warning: python /nope/python is not on this machine" in done.stderr
    assert "bad.py, line 1: '(' was never closed" in done.stderr
