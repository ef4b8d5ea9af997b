"""Owners and modes of files decide which of them may act for a user."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from hpc_ddp.core import file_owners
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_owners import check_folder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import link_job
from unit.fakes import GROUP, STRANGER, USER, set_acl

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
def test_the_fault_of_a_file_is_named(
    file: os.stat_result, folder: os.stat_result, fault: str
) -> None:
    others_can_write = file_owners.is_writable_by_others(file, Path("/dev/null"))
    answer = file_owners.file_fault(file, folder, USER, others_can_write)
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
def test_a_group_of_one_user_counts_as_that_user(
    members: list[str], name: str, gid: int, is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = account("me", USER)
    group = grp.struct_group((name, "x", gid, members))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    file = status(REGULAR, 0o664, USER, gid)
    assert file_owners.is_writable_by_others(file, Path("/dev/null")) is not is_private


def test_an_acl_of_a_private_group_speaks_of_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the group are the ACL's mask."""
    monkeypatch.setattr(file_owners, "_is_private", lambda gid, uid: True)
    run = RunFolder(tmp_path / "runs" / "train" / "1").make()
    for path in (run.root, run.path.parent):
        path.chmod(0o775)
        check_folder(run)
        set_acl(path)
        assert path.stat().st_mode & 0o777 == 0o775
        with pytest.raises(UsageError, match=r"can be written by other users \(mode 0775\)"):
            check_folder(run)
        path.chmod(0o755)  # the hint: the mask lets others write no more
        check_folder(run)


def test_below_a_default_acl_others_write_no_folder_of_runs(tmp_path: Path) -> None:
    """It takes the umask's place."""
    set_acl(tmp_path, "default")
    run = RunFolder(tmp_path / "runs" / "train" / "1").make()
    link_job(JobRef("7", "main"), run)
    made = [run.root, *run.root.rglob("*/")]
    assert run.root / f".jobs-{os.geteuid()}" / "main" in made
    assert [path for path in made if path.stat().st_mode & 0o022] == []


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
    assert file_owners.is_writable_by_others(file, Path("/dev/null")) is ("you" in names)
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
def test_files_of_other_users_are_not_executed(entry: os.stat_result, fault: str) -> None:
    assert file_owners.run_fault(Path("/dev/null"), entry, USER) == fault


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


@pytest.mark.parametrize("part", ["runs", "runs/train"])
def test_runs_are_not_made_behind_a_link_of_another_user(
    tmp_path: Path, run: RunFolder, part: str, links_are_anothers: None
) -> None:
    folder = tmp_path / part
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(UsageError, match="a link of another user"):
        check_folder(RunFolder(folder.parent / run.path.relative_to(folder.parent)))
