"""Files of other users: a settings file, a site file and a template run nothing before consent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpc_ddp.cli.main import main
from hpc_ddp.core import file_owners
from hpc_ddp.submission.script import template_sandbox
from hpc_ddp.submission.settings import operators
from tests.skips import skip_or_fail

REPO = Path(__file__).parents[2]
STRANGER = 54321
EXTENDS = "{% extends 'job.sbatch.j2' %}\n"
# From a variable of jinja's own to Python's modules: what any template could do.
RUNS_A_COMMAND = (
    EXTENDS + "{% block setup %}\n"
    "{{ self.__init__.__globals__.__builtins__.__import__('os').popen('touch PROOF').read() }}"
    "{% endblock %}"
)

CACHES = (file_owners._is_shared, operators.warn_once, template_sandbox._make_environment)
Cli = Callable[..., Result]


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        skip_or_fail("only root can give a file to another user")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a settings file and a template, and a folder in it with the user's script."""
    project = tmp_path / "shared"
    (project / "mine").mkdir(parents=True)
    (project / "mine" / "train.py").write_text("")
    (project / "hpc-ddp.toml").write_text('template = "own.j2"\n')
    (project / "own.j2").write_text(EXTENDS + "{% block setup %}module load ours\n{% endblock %}")
    return project


@pytest.fixture
def hpc_ddp(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`hpc-ddp`, called in the user's folder, with nothing of this process's environment."""

    def call(*words: str) -> Result:
        env = dict.fromkeys(os.environ) | {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path / "home"),
        }
        env |= {"HPC_DDP_RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(REPO)}
        monkeypatch.chdir(project / "mine")
        for cached in CACHES:  # a command is a process of its own
            cached.cache_clear()
        return CliRunner(env=env).invoke(main, words, catch_exceptions=False)

    return call


def give_away(*paths: Path) -> None:
    for path in paths:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def test_a_strangers_template_runs_no_command(
    as_root: None, project: Path, hpc_ddp: Cli, tmp_path: Path
) -> None:
    proof = tmp_path / "proof"
    (project / "own.j2").write_text(RUNS_A_COMMAND.replace("PROOF", str(proof)))
    give_away(project / "hpc-ddp.toml", project / "own.j2", project)
    done = hpc_ddp("render", "train.py")
    assert not proof.exists()
    assert done.exit_code == 2, done.stderr
    assert f"{project / 'hpc-ddp.toml'} is not used: it belongs to uid {STRANGER}" in done.stderr
    assert "accepted: a file that belongs to you or to root" in done.stderr
    assert f"hpc-ddp trust {project / 'hpc-ddp.toml'}" in done.stderr
    assert "Traceback" not in done.stderr


def test_accepted_files_count_until_they_change(
    as_root: None, project: Path, hpc_ddp: Cli, tmp_path: Path
) -> None:
    settings, template = project / "hpc-ddp.toml", project / "own.j2"
    give_away(settings, template)
    assert hpc_ddp("trust", str(settings)).stdout == f"{settings}\n"
    done = hpc_ddp("render", "train.py")  # the template that the file names is a file of its own
    assert done.exit_code == 2
    assert f"{template} is not used: it belongs to uid {STRANGER}" in done.stderr
    assert hpc_ddp("trust", str(template)).exit_code == 0
    done = hpc_ddp("render", "train.py")
    assert done.exit_code == 0, done.stderr
    assert "module load ours" in done.stdout
    record = tmp_path / "home" / ".config" / "hpc-ddp" / "trusted.json"
    assert record.stat().st_mode & 0o777 == 0o600
    assert json.loads(record.read_text()).keys() == {str(settings), str(template)}
    template.write_text(template.read_text() + "{# another #}")
    done = hpc_ddp("render", "train.py")
    assert done.exit_code == 2
    assert "and has changed since it was accepted" in done.stderr
    os.chown(settings, STRANGER + 1, -1)
    assert f"belongs to uid {STRANGER + 1}, and has changed" in hpc_ddp("render", "a.py").stderr
    done = hpc_ddp("status")  # a run can be looked after without the file
    assert done.exit_code == 0
    assert f"warning: {settings} is not used" in done.stderr


@pytest.mark.parametrize("statement", ["include", "extends"])
def test_what_a_template_takes_in_is_checked(
    as_root: None, project: Path, hpc_ddp: Cli, statement: str
) -> None:
    (project / "part.j2").write_text(EXTENDS if statement == "extends" else "module load theirs")
    block = "{% block setup %}{% include 'part.j2' %}{% endblock %}"
    text = EXTENDS + block if statement == "include" else "{% extends 'part.j2' %}"
    (project / "own.j2").write_text(text)
    assert hpc_ddp("render", "train.py").exit_code == 0
    give_away(project / "part.j2")
    done = hpc_ddp("render", "train.py")
    assert done.exit_code == 2
    assert f"{project / 'part.j2'} is not used" in done.stderr


def test_a_template_of_the_command_line_is_checked(
    as_root: None, project: Path, hpc_ddp: Cli
) -> None:
    (project / "hpc-ddp.toml").unlink()
    give_away(project / "own.j2")
    done = hpc_ddp("render", "--template", "../own.j2", "train.py")
    assert done.exit_code == 2
    assert f"{project / 'own.j2'} is not used" in done.stderr


def test_a_site_file_is_checked(as_root: None, project: Path, hpc_ddp: Cli, tmp_path: Path) -> None:
    site = tmp_path / "home" / ".config" / "hpc-ddp" / "site.toml"
    site.parent.mkdir(parents=True)
    site.write_text('account = "ours"\n')
    assert "--account=ours" in hpc_ddp("render", "train.py").stdout
    give_away(site)
    for words in (["render", "train.py"], ["site", "list"], ["clean"]):
        done = hpc_ddp(*words)
        assert done.exit_code == 2
        assert f"{site} is not used" in done.stderr


@pytest.mark.parametrize("text", ["[1]", "{", "\udcff"])
def test_a_broken_record_is_an_error(
    as_root: None, project: Path, hpc_ddp: Cli, tmp_path: Path, text: str
) -> None:
    record = tmp_path / "home" / ".config" / "hpc-ddp" / "trusted.json"
    record.parent.mkdir(parents=True)
    record.write_bytes(text.encode(errors="surrogateescape"))
    give_away(project / "hpc-ddp.toml")
    done = hpc_ddp("render", "train.py")
    assert done.exit_code == 2, done.stderr
    assert f"hint: rm {record}" in done.stderr


def test_what_can_not_be_accepted(project: Path, hpc_ddp: Cli) -> None:
    done = hpc_ddp("trust", "gone.toml")
    assert (done.exit_code, "gone.toml can't be read: No such file" in done.stderr) == (2, True)
    os.mkfifo(project / "mine" / "pipe")
    done = hpc_ddp("trust", "pipe")
    assert (done.exit_code, "pipe is no regular file" in done.stderr) == (2, True)
    assert hpc_ddp("trust", ".").exit_code == 2


def test_a_file_that_a_group_can_write_says_chmod(
    as_root: None, project: Path, hpc_ddp: Cli
) -> None:
    settings = project / "hpc-ddp.toml"
    os.chown(settings, -1, STRANGER)
    settings.chmod(0o664)
    done = hpc_ddp("render", "train.py")
    assert done.exit_code == 2
    assert "other users can write it (mode 0664)" in done.stderr
    assert f"hint: chmod go-w {settings}; or, as it is now: hpc-ddp trust" in done.stderr
    settings.chmod(0o644)
    assert hpc_ddp("render", "train.py").exit_code == 0


def test_an_accepted_template_runs_no_command_either(
    project: Path, hpc_ddp: Cli, tmp_path: Path
) -> None:
    proof = tmp_path / "proof"
    (project / "own.j2").write_text(RUNS_A_COMMAND.replace("PROOF", str(proof)))
    done = hpc_ddp("render", "train.py")
    assert not proof.exists()
    assert done.exit_code == 2
    assert f"{project / 'own.j2'}, line 3: access to attribute '__init__'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def run(project: Path, hpc_ddp: Cli, tmp_path: Path) -> Path:
    """A run whose Python is a script that leaves a file behind."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path / 'proof'}\n")
    python.chmod(0o755)
    done = hpc_ddp("render", "--launcher", "srun", "--python", str(python), "train.py")
    path = done.stderr.partition("run: ")[2].splitlines()[0]
    return Path(path)


COMMANDS_THAT_EXECUTE = [
    ["dry-run", "--run", "RUN"],
    ["submit", "--backend", "local", "--run", "RUN"],
    ["rerun", "--backend", "local", "RUN"],
    ["rerun", "--backend", "local", "--same-code", "RUN"],
    ["attach", "RUN"],
    ["cancel", "RUN"],
]


@pytest.mark.parametrize("words", COMMANDS_THAT_EXECUTE, ids=" ".join)
def test_a_strangers_run_is_not_executed(
    as_root: None, words: list[str], run: Path, hpc_ddp: Cli, tmp_path: Path
) -> None:
    give_away(run, *run.rglob("*"))
    done = hpc_ddp(*(word.replace("RUN", str(run)) for word in words))
    assert not (tmp_path / "proof").exists()
    assert done.exit_code == 2, done.stderr
    assert f"run {run} can only be read: {run} belongs to uid {STRANGER}" in done.stderr
    assert "hint: submit the script yourself" in done.stderr


def test_a_strangers_run_is_read(as_root: None, run: Path, hpc_ddp: Cli, tmp_path: Path) -> None:
    give_away(run, *run.rglob("*"))
    output = str(tmp_path / "page.html")
    for words in (["status"], ["explain"], ["verify"], ["report", "-o", output]):
        done = hpc_ddp(*words, str(run))
        assert done.exit_code == 0, done.stderr
    assert hpc_ddp("logs", str(run)).stderr.count("error:") == 1  # it has printed nothing yet


@pytest.mark.parametrize(
    "part",
    [
        *("lib/node.py", "lib/hpc_ddp/node", "code/0/train.py", "job.json", "checkpoints"),
        *("journal", "journal/submit.jsonl", "logs", "logs/attempt-0", "logs/attempt-0/next.json"),
    ],
)
@pytest.mark.parametrize("change", ["owner", "mode"])
def test_a_part_of_a_run_that_others_may_have_written(
    as_root: None, run: Path, hpc_ddp: Cli, part: str, change: str
) -> None:
    path = run / part
    (run / "journal" / "submit.jsonl").touch()
    (run / "logs" / "attempt-0").mkdir()
    (run / "logs" / "attempt-0" / "next.json").write_text("{}")
    os.chown(path, STRANGER if change == "owner" else -1, STRANGER)
    path.chmod(path.stat().st_mode | (0o020 if change == "mode" else 0))
    # Others can't enter the folder: modes in it do not count, and owners do.
    done = hpc_ddp("dry-run", "--run", str(run))
    assert (done.exit_code == 2) == (change == "owner")
    run.chmod(0o750)
    os.chown(path, -1, STRANGER)  # a start has brought a new library
    path.chmod(path.stat().st_mode | (0o020 if change == "mode" else 0))
    done = hpc_ddp("dry-run", "--run", str(run))
    assert done.exit_code == 2, done.stderr
    assert f"can only be read: {path} " in done.stderr
    assert (f"hint: chmod -R go-w {run}, if" in done.stderr) == (change == "mode")


def test_a_strangers_run_is_reported_elsewhere(
    as_root: None, run: Path, project: Path, hpc_ddp: Cli, tmp_path: Path
) -> None:
    """Its folder may hold a link to a file of the viewer's in the place of the page."""
    mine = tmp_path / "mine.txt"
    mine.write_text("kept")
    (run / "report.html").symlink_to(mine)
    give_away(run)
    done = hpc_ddp("report", str(run))
    assert done.exit_code == 0, done.stderr
    assert mine.read_text() == "kept"
    assert Path(done.stdout.strip()) == project / "mine" / "report.html"


def test_a_folder_here_that_is_a_strangers_run(
    as_root: None, run: Path, project: Path, hpc_ddp: Cli, tmp_path: Path
) -> None:
    """It comes before the user's run of that name, and so is refused in place of being started."""
    planted = project / "mine" / "train"
    run.rename(planted)
    assert hpc_ddp("render", "train.py").exit_code == 0
    give_away(planted)
    done = hpc_ddp("rerun", "--backend", "local", "train")
    assert done.exit_code == 2
    assert f"run {planted} can only be read" in done.stderr
    assert not (tmp_path / "proof").exists()
