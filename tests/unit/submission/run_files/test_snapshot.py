"""Scripts and their folders are copied into the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.package_files import PACKAGE
from hpc_ddp.submission.run_files import snapshot
from hpc_ddp.submission.run_files.library import carry_library
from tests.skips import skip_or_fail
from unit.fakes import STRANGER


def test_a_broken_git_index_is_named(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / ".git" / "index").write_text("x")
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    with pytest.raises(UsageError, match=r"git can't list the files of .*index") as error:
        snapshot.take_snapshot(script, run, ())
    assert str(tmp_path) in str(error.value.hint)


def test_git_fetches_nothing_for_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To fetch a missing tree of a partial clone would run a command of the clone's owner."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    repository, ran = tmp_path / "clone", tmp_path / "ran"

    def git(*words: str) -> str:
        argv = ["git", "-c", "user.name=n", "-c", "user.email=a@b", "-C", str(repository), *words]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    for name in ("d/e/f", "top/train.py"):
        (repository / name).parent.mkdir(parents=True)
        (repository / name).write_text("1")
    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message=x")
    git("sparse-checkout", "init", "--cone", "--sparse-index")
    git("sparse-checkout", "set", "top")
    tree = git("rev-parse", "HEAD:d")
    settings = {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": "ssh://x/y",
        "remote.origin.promisor": "true",
        "remote.origin.fetch": "+refs/heads/*:refs/remotes/origin/*",
        "core.sshCommand": f"touch {ran}; false",
    }
    for name, text in settings.items():
        git("config", name, text)
    (repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    with suppress(UsageError):
        snapshot.take_snapshot(repository / "top" / "train.py", run, ())
    assert not ran.exists()


def test_a_later_start_brings_its_own_library(tmp_path: Path) -> None:
    """The batch script of a newer hpc-ddp calls parts that an older library does not have."""
    run = RunFolder(tmp_path / "train" / "20260101-000000-abcd").make()
    carry_library(run)
    (run.lib / "hpc_ddp" / "node" / "batch.py").write_text("of an older version")
    task = RunFolder(run.path / "task-1").make()
    task.lib.symlink_to("../lib")
    carry_library(task)
    assert (run.lib / "hpc_ddp" / "node" / "batch.py").read_text() == "of an older version"
    carry_library(run)
    current = PACKAGE / "node" / "batch.py"
    assert (run.lib / "hpc_ddp" / "node" / "batch.py").read_text() == current.read_text()
    assert not list(run.path.glob(".lib*"))


def test_what_a_submit_copies_has_the_times_of_now(tmp_path: Path) -> None:
    """Sites remove files of old times from scratch; the package was installed long ago."""
    began = time.time() - 60
    run = RunFolder(tmp_path / "train" / "20260101-000000-abcd").make()
    carry_library(run)
    (tmp_path / "train.py").touch()
    os.utime(tmp_path / "train.py", (1, 1))
    snapshot.take_snapshot(tmp_path / "train.py", run, ())
    assert min(path.stat().st_mtime for path in run.path.rglob("*.py")) > began


def test_a_copy_whose_note_can_not_be_written_is_removed(tmp_path: Path) -> None:
    """A later submit would take it for a whole one."""
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.touch()
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    (run.code / ".script-0" / "x").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        snapshot.take_snapshot(script, run, ())
    assert [path.name for path in run.code.iterdir()] == [".script-0"]


def test_a_snapshot_takes_no_folder_of_an_older_one(tmp_path: Path) -> None:
    """Its user has removed the oldest, for room."""
    script = tmp_path / "live" / "train.py"
    script.parent.mkdir()
    script.write_text("")
    run = RunFolder(tmp_path / "train" / "20260101-000000-abcd").make()
    for number in range(2):
        assert snapshot.next_place(script, run)[0] == run.code / str(number)
        snapshot.take_snapshot(script, run, ())
    shutil.rmtree(run.code / "0")
    assert snapshot.next_place(script, run) == (run.code / "2", run.code / "2" / "train.py")


def test_files_that_have_find_changed_files_are_named(tmp_path: Path) -> None:
    code, live = tmp_path / "code" / "0", tmp_path / "live"
    for folder in (code, live):
        (folder / "sub").mkdir(parents=True)
        for name in ("same.py", "sub/other.py", "sub/gone.py", "sub/train.py"):
            (folder / name).write_text(name)
    (live / "sub" / "gone.py").unlink()
    (live / "sub" / "other.py").write_text("new")
    (live / "more.py").write_text("no part of the snapshot")
    (code / "output.txt").write_text("of an earlier run")
    changed = snapshot.find_changed_files(code, Path("sub/train.py"), live / "sub" / "train.py")
    assert changed == ["sub/gone.py", "sub/other.py"]


@pytest.mark.parametrize("has_git", [False, True])
def test_what_trainings_leave_behind_is_no_code(
    tmp_path: Path, has_git: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if has_git:
        subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    script = tmp_path / "train.py"
    script.touch()
    plain = RunFolder(tmp_path / "runs" / "train" / "local").make()
    plain.job_json.write_text("{}")
    (plain.path / "journal").mkdir(exist_ok=True)
    (plain.path / "journal" / "rank-0.jsonl").touch()
    for name, size in (("small.pt", 1000), ("best.pt", 40 * 10**6), ("last.pth", 30 * 10**6)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    run = RunFolder(tmp_path / "elsewhere" / "train" / "20260101-000000-abcd")
    assert sorted(snapshot.select_files(script, run, ())[1]) == ["small.pt", "train.py"]
    assert "no room for best.pt (40.0 MB), last.pth (30.0 MB)" in capsys.readouterr().err
    assert sorted(snapshot.select_files(script, run, ("last.*",))[1]) == [
        *("best.pt", "small.pt", "train.py"),
    ]
    assert not capsys.readouterr().err


def _make_repository(folder: Path, *names: str) -> None:
    """Make a git repository with empty files, all of them committed."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    git = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "--quiet"], check=True)
    for words in (("add", "."), ("commit", "--quiet", "--message", "first")):
        subprocess.run([*git, *words], check=True)


def test_submodules_are_code_and_other_clones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job without them takes another version that is installed, or ends at its import."""
    _make_repository(tmp_path / "library", "library/__init__.py", "deeper/x.py")
    project = tmp_path / "project"
    _make_repository(project, "train.py")
    add = ("submodule", "--quiet", "add", str(tmp_path / "library"), "third party/library")
    git = ("git", "-c", "protocol.file.allow=always", "-C", str(project))
    subprocess.run([*git, *add], check=True)
    _make_repository(project / "clone", "tools.py")
    (project / "clone" / ".gitignore").write_text("*.log\n")
    (project / "clone" / "a.log").touch()
    run = RunFolder(project / "runs" / "train" / "20260101-000000-abcd").make()
    script = project / "train.py"
    snapshot.take_snapshot(script, run, ())
    copy = run.code / "0"
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == [
        ".gitmodules",
        *("third party/library/deeper/x.py", "third party/library/library/__init__.py"),
        "train.py",
    ]
    assert "leaves out clone/, a git repository of its own" in capsys.readouterr().err


def test_the_repository_of_a_hook_is_not_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git exports GIT_DIR to hooks in a linked work tree, and to ``rebase --exec``."""
    _make_repository(tmp_path / "other", "x.py")
    project = tmp_path / "project"
    _make_repository(project, "scripts/train.py", "package/model.py")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_PREFIX", "")
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    snapshot.take_snapshot(project / "scripts" / "train.py", run, ())
    assert (run.code / "0" / "package" / "model.py").exists()


def test_a_script_is_itself_beside_a_package_with_the_folders_name(tmp_path: Path) -> None:
    project = tmp_path / "minigpt"
    _make_repository(project, "train.py", "minigpt/train.py")
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    snapshot.take_snapshot(project / "train.py", run, ())
    assert snapshot.find_newest(run, project / "train.py") == (run.code / "0", Path("train.py"))
    inner = Path("minigpt", "train.py")
    assert snapshot.find_newest(run, project / inner) == (run.code / "0", inner)


def test_a_repository_below_a_home_that_is_a_link_is_copied_as_a_whole(tmp_path: Path) -> None:
    project = tmp_path / "disk" / "me" / "project"
    (project / "scripts").mkdir(parents=True)
    (project / "scripts" / "train.py").write_text("import model\n")
    (project / "model.py").write_text("")
    subprocess.run(["git", "init", "--quiet", str(project)], check=True)
    (tmp_path / "home").symlink_to("disk")
    home = tmp_path / "home" / "me" / "project"
    run = RunFolder(project / "runs" / "train" / "20260101-000000-abcd").make()
    (run.path / "old.py").write_text("")
    script = home / "scripts" / "train.py"
    snapshot.take_snapshot(script, run, ())
    inside = Path("scripts", "train.py")
    assert snapshot.find_newest(run, script) == (run.code / "0", inside)
    copies = {str(path.relative_to(run.code / "0")) for path in (run.code / "0").rglob("*.py")}
    assert copies == {str(inside), "model.py"}


def test_a_home_that_is_a_repository_of_settings_is_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    (home / ".netrc").write_text("password")
    (home / "project" / "train.py").write_text("")
    subprocess.run(["git", "init", "--quiet", str(home)], check=True)
    monkeypatch.setenv("HOME", str(home))
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    snapshot.take_snapshot(home / "project" / "train.py", run, ())
    assert [path.name for path in (run.code / "0").iterdir()] == ["train.py"]


@pytest.mark.parametrize("has_git", [False, True])
def test_links_lead_where_they_led(
    tmp_path: Path, has_git: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "model.py").write_text("common")
    project = tmp_path / "project"
    (project / "part").mkdir(parents=True)
    (project / "train.py").write_text("import common.model, part.model\n")
    (project / "part" / "inside.py").symlink_to("../train.py")
    (project / "part" / "model.py").symlink_to("../../common/model.py")
    (project / "common").symlink_to("../common")
    (project / "loop").symlink_to("loop")
    if has_git:
        subprocess.run(["git", "init", "--quiet", str(project)], check=True)
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    snapshot.take_snapshot(project / "train.py", run, ())
    copy = run.code / "0"
    assert (copy / "part" / "model.py").read_text() == "common"
    assert (copy / "common" / "model.py").read_text() == "common"
    assert (copy / "part" / "inside.py").resolve() == copy / "train.py"
    assert "leaves out" not in capsys.readouterr().err


def test_a_module_that_git_ignores_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "train.py": "import torch, config, data.loader, broken, warned\nfrom models import net\n",
        "models/__init__.py": "",
        "models/net.py": "def build():\n    from . import secret\n    from ..above import x\n",
        "models/secret.py": "",
        "config.py": "",
        "data/__init__.py": "import unused",
        "data/loader.py": "",
        "broken.py": "(",
        "warned.py": "x = '\\d'\nfrom ...... import far\n",
        "unused/__init__.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".gitignore").write_text("data/\nconfig.py\nsecret.py\n")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    snapshot.take_snapshot(tmp_path / "train.py", run, ())
    notes = capsys.readouterr().err
    for name in ("config.py", "data/__init__.py", "data/loader.py", "models/secret.py"):
        assert f"leaves out {name}, which the script imports" in notes
    assert notes.count("leaves out") == 4


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of Python 3.11")
def test_the_library_is_imported_with_pythonsafepath(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    carry_library(run)
    part = run.lib / "hpc_ddp" / "node" / "where.py"
    part.write_text("def main(words):\n    print(__file__)\n    return 0\n")
    ended = subprocess.run(
        [sys.executable, str(run.lib / "node.py"), "where"],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.stdout.strip(), ended.stderr) == (str(part), "")


@pytest.fixture
def script_below_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the user's folder, in a work tree of another user that git is told to accept, as
    in a scratch folder of all users."""
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "safe.directory")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "*")
    script = tmp_path / "mine" / "train.py"
    script.parent.mkdir()
    script.touch()
    (tmp_path / "yaml.py").touch()
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    for path in (tmp_path / "yaml.py", tmp_path / ".git", *(tmp_path / ".git").rglob("*")):
        os.chown(path, STRANGER, -1)
    return script


@pytest.mark.parametrize("is_own_top", [False, True])
def test_a_work_tree_of_another_user_is_none(
    script_below_a_stranger: Path, is_own_top: bool
) -> None:
    script, top = script_below_a_stranger, script_below_a_stranger.parent.parent
    if is_own_top:  # the stranger's settings exclude files of the user's all the same
        (top / ".git" / "config").write_text(f"[core]\nworktree = {script.parent}\n")
    run = RunFolder(top / "runs" / "train" / "20260101-000000-abcd")
    assert snapshot.next_place(script, run)[1] == run.code / "0" / "train.py"
    assert snapshot.select_files(script, run, ()) == (script.parent, ["train.py"])


@pytest.mark.parametrize("has_git", [False, True])
def test_files_of_other_users_are_no_code(
    script_below_a_stranger: Path, has_git: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A colleague may write in the folder: the copies would be the user's, and be imported."""
    script, folder = script_below_a_stranger, script_below_a_stranger.parent
    if has_git:
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    for name in ("numpy.py", "pipe.py", "part.py"):
        (folder / name).touch()
    (folder / "yaml.py").symlink_to("part.py")
    for name in ("numpy.py", "yaml.py"):
        os.chown(folder / name, STRANGER, -1, follow_symlinks=False)
    run = RunFolder(folder / "runs" / "train" / "20260101-000000-abcd")
    assert sorted(snapshot.select_files(script, run, ())[1]) == ["part.py", "pipe.py", "train.py"]
    note = capsys.readouterr().err
    assert f"leaves out numpy.py of uid {STRANGER}; files of other users: 2" in note
    if has_git:
        module = folder / "module"
        _make_repository(module, "tools.py")
        subprocess.run(["git", "-C", str(folder), "add", "--force", "module"], check=True)
        for path in (module, *module.rglob("*")):
            os.chown(path, STRANGER, -1)
        assert "module/tools.py" not in snapshot.select_files(script, run, ())[1]
        capsys.readouterr()
    os.chown(script, STRANGER, -1)  # who names a colleague's script means what lies beside it
    if has_git:
        assert "module/tools.py" in snapshot.select_files(script, run, ())[1]
    assert {"numpy.py", "yaml.py"} < {
        Path(name).name for name in snapshot.select_files(script, run, ())[1]
    }
    assert not capsys.readouterr().err
