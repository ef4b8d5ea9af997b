"""Owners and modes of files: which may act for a user, whoever runs the tests."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
from pathlib import Path

import pytest

from hpc_ddp.core import file_owners
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_owners import check_folder
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission import backends, plan, snapshot
from hpc_ddp.submission.resources import PACKAGE
from hpc_ddp.submission.settings import sites, trust
from hpc_ddp.submission.settings.config import Settings
from tests.raw_events import raw
from tests.skips import skip_or_fail

USER, STRANGER, GROUP = 54321, 54322, 54323
REGULAR, FOLDER, LINK = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK


def status(kind: int, mode: int, uid: int, gid: int = GROUP) -> os.stat_result:
    return os.stat_result((kind | mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("file", "folder", "fault"),
    [
        (status(REGULAR, 0o644, USER), status(FOLDER, 0o755, USER), ""),
        (status(REGULAR, 0o444, 0), status(FOLDER, 0o755, 0), ""),
        (status(REGULAR, 0o644, STRANGER), status(FOLDER, 0o755, USER), "belongs to uid 54322"),
        (status(REGULAR, 0o664, USER), status(FOLDER, 0o755, USER), "can write it (mode 0664)"),
        (status(REGULAR, 0o646, 0), status(FOLDER, 0o755, 0), "can write it (mode 0646)"),
        (status(FOLDER, 0o755, USER), status(FOLDER, 0o755, USER), "no regular file"),
        # A group's folder: what is put in place of the file belongs to who has put it there.
        (status(REGULAR, 0o644, USER), status(FOLDER, 0o2775, STRANGER), ""),
        (status(REGULAR, 0o644, USER), status(FOLDER, 0o777, USER), "can replace it"),
        (status(REGULAR, 0o644, USER), status(FOLDER, 0o1777, 0), ""),
        (status(REGULAR, 0o644, 0), status(FOLDER, 0o1777, 0), "can replace it"),
    ],
)
def test_what_is_wrong_with_a_file(
    file: os.stat_result, folder: os.stat_result, fault: str
) -> None:
    answer = file_owners.file_fault(file, folder, USER)
    assert bool(answer) == bool(fault)
    assert fault in answer


def account(name: str, uid: int) -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, GROUP, "", "/", "/bin/sh"))


@pytest.mark.parametrize(
    ("members", "name", "gid", "is_private"),
    [
        ([], "me", GROUP, True),
        (["me"], "me", GROUP, True),
        (["me", "you"], "me", GROUP, False),
        ([], "project", GROUP, False),
        ([], "me", GROUP + 1, False),
    ],
)
def test_a_group_of_one_user_is_that_user(
    members: list[str], name: str, gid: int, is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = account("me", USER)
    group = grp.struct_group((name, "x", gid, members))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    file = status(REGULAR, 0o664, USER, gid)
    assert file_owners.is_writable_by_others(file) is not is_private


@pytest.mark.parametrize("names", [[], ["me"], ["me", "alias"], ["me", "you"]])
def test_a_group_may_be_the_primary_one_of_another_user(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = {"me": USER, "alias": USER, "you": STRANGER}
    group = grp.struct_group(("me", "x", GROUP, []))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: account("me", USER))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    monkeypatch.setattr(pwd, "getpwall", lambda: [account(name, uids[name]) for name in names])
    file_owners._is_shared.cache_clear()
    file = status(REGULAR, 0o664, USER)
    assert file_owners.is_writable_by_others(file) is ("you" in names)
    file_owners._is_shared.cache_clear()


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (status(REGULAR, 0o644, USER), ""),
        (status(REGULAR, 0o644, 0), "belongs to user root"),  # root's own runs are root's
        (status(FOLDER, 0o755, STRANGER), "belongs to uid 54322"),
        (status(FOLDER, 0o775, USER), "can be written by other users (mode 0775)"),
        (status(LINK, 0o777, USER), ""),  # no file system looks at a link's mode
        (status(LINK, 0o777, STRANGER), "belongs to uid 54322"),
    ],
)
def test_what_of_a_run_is_not_executed(entry: os.stat_result, fault: str) -> None:
    assert file_owners.run_fault(entry, USER) == fault


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        skip_or_fail("only root can give a file to another user")


def test_a_link_is_judged_with_its_end(as_root: None, tmp_path: Path) -> None:
    end, link = tmp_path / "end", tmp_path / "link"
    end.write_text("x")
    link.symlink_to(end)
    assert trust.read(link) == b"x"
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    with pytest.raises(UsageError, match="it is a symbolic link that belongs to uid 54322"):
        trust.read(link)
    os.chown(link, 0, -1, follow_symlinks=False)
    os.chown(end, STRANGER, -1)
    with pytest.raises(UsageError, match=r"link is not used: it belongs to uid 54322"):
        trust.read(link)


def test_a_file_put_in_place_after_the_opening_is_not_read(
    as_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "hpc-ddp.toml", tmp_path / "other"
    path.write_text("good")
    other.write_text("bad")
    os.chown(other, STRANGER, -1)
    real_fstat = os.fstat

    def replace_first(descriptor: int) -> os.stat_result:
        other.replace(path)
        monkeypatch.setattr(os, "fstat", real_fstat)
        return real_fstat(descriptor)

    monkeypatch.setattr(os, "fstat", replace_first)
    assert trust.read(path) == b"good"
    with pytest.raises(UsageError, match="belongs to uid 54322"):
        trust.read(path)


def test_a_file_is_accepted_by_any_way_to_it(
    as_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "project" / "hpc-ddp.toml"
    path.parent.mkdir()
    path.write_text("x")
    os.chown(path, STRANGER, -1)
    (tmp_path / "link").symlink_to(path.parent)
    trust.accept(tmp_path / "link" / path.name)
    assert trust.read(path) == b"x"


def test_a_strangers_record_accepts_nothing(
    as_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "hpc-ddp.toml"
    path.write_text("x")
    os.chown(path, STRANGER, -1)
    trust.accept(path)
    os.chown(tmp_path / trust.RECORD, STRANGER, -1)
    with pytest.raises(UsageError, match=r"trusted.json is not used: it belongs to uid 54322"):
        trust.read(path)


def test_a_site_file_that_hpc_ddp_writes_is_used(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = sites.write(tmp_path, "ours", 'title = "Ours"\n', force=False)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_nothing_of_a_run_can_be_written_by_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner has the umask of a project's group, and so have the script and the package."""
    umask = os.umask(0o002)
    try:
        project = tmp_path / "project"
        (project / "part").mkdir(parents=True)
        (project / "part" / "more.py").write_text("")
        (project / "train.py").write_text("")
        package = tmp_path / "hpc_ddp"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (*package.rglob("*"), *project.rglob("*")):
            path.chmod(path.stat().st_mode | 0o020)
        monkeypatch.setattr(snapshot, "PACKAGE", package)
        settings = Settings({"script": "train.py"})
        run = plan.plan_new(settings, project, tmp_path / "runs").write()
        backends.render(run)
        run.run.journal("worker").write(raw("first_step", step=1))  # a worker has its user's umask
        assert os.umask(0o002) == 0o002
    finally:
        os.umask(umask)
    made = [run.run.path, *run.run.path.rglob("*")]
    assert {run.run.script, run.run.lib / "node.py", run.code / "part" / "more.py"} <= {*made}
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    for folder in (run.run.path.parent, run.run.root):
        assert not folder.stat().st_mode & 0o022


@pytest.mark.parametrize(
    ("folder", "mode", "fault"),
    [
        ("root", 0o755, ""),
        ("root", 0o1777, ""),
        ("root", 0o777, "can be written by other users"),
        ("name", 0o777, "can be written by other users"),
    ],
)
def test_runs_are_made_where_others_can_not_replace_them(
    tmp_path: Path, folder: str, mode: int, fault: str
) -> None:
    run = RunFolder(tmp_path / "runs" / "train" / "1").make()
    {"root": run.root, "name": run.path.parent}[folder].chmod(mode)
    if fault:
        with pytest.raises(UsageError, match=fault) as caught:
            check_folder(run)
        assert "chmod" in str(caught.value.hint)
    else:
        check_folder(run)


def test_runs_are_not_made_in_a_strangers_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "train" / "1").make()
    if os.geteuid():
        pytest.skip("to give a folder away takes root")
    os.chown(run.path.parent, 2002, -1)
    with pytest.raises(UsageError, match="belongs to uid 2002"):
        check_folder(run)
