"""Settings files of other users are used only after `hpc-ddp trust`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_ddp.core import file_owners
from hpc_ddp.core.errors import UsageError
from hpc_ddp.submission.settings import trust
from tests.skips import skip_or_fail
from unit.fakes import STRANGER, set_acl


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        skip_or_fail("only root can give a file to another user")


def test_a_link_is_judged_with_its_target(as_root: None, tmp_path: Path) -> None:
    end, link = tmp_path / "end", tmp_path / "link"
    end.write_text("x")
    link.symlink_to(end)
    assert trust.read_trusted(link) == b"x"
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    with pytest.raises(UsageError, match="it is a symbolic link that belongs to uid 54322"):
        trust.read_trusted(link)
    os.chown(link, 0, -1, follow_symlinks=False)
    os.chown(end, STRANGER, -1)
    with pytest.raises(UsageError, match=r"link is not used: it belongs to uid 54322"):
        trust.read_trusted(link)


def test_a_file_replaced_after_its_opening_is_not_read(
    as_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replacement = tmp_path / "hpc-ddp.toml", tmp_path / "other"
    path.write_text("good")
    replacement.write_text("bad")
    os.chown(replacement, STRANGER, -1)
    real_fstat = os.fstat

    def replace_first(descriptor: int) -> os.stat_result:
        replacement.replace(path)
        monkeypatch.setattr(os, "fstat", real_fstat)
        return real_fstat(descriptor)

    monkeypatch.setattr(os, "fstat", replace_first)
    assert trust.read_trusted(path) == b"good"
    with pytest.raises(UsageError, match="belongs to uid 54322"):
        trust.read_trusted(path)


def test_a_file_that_others_write_by_an_acl_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the owner's group has no other member."""
    monkeypatch.setattr(file_owners, "_is_private", lambda gid, uid: True)
    path = tmp_path / "hpc-ddp.toml"
    path.write_text("good")
    path.chmod(0o664)
    assert trust.read_trusted(path) == b"good"
    set_acl(path)
    with pytest.raises(UsageError, match="other users can write it") as caught:
        trust.read_trusted(path)
    assert str(caught.value.hint).startswith("chmod go-w ")


def test_an_accepted_file_is_read_by_any_path(
    as_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "project" / "hpc-ddp.toml"
    path.parent.mkdir()
    path.write_text("x")
    os.chown(path, STRANGER, -1)
    (tmp_path / "link").symlink_to(path.parent)
    trust.accept_file(tmp_path / "link" / path.name)
    assert trust.read_trusted(path) == b"x"


def test_a_strangers_record_accepts_nothing(
    as_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "hpc-ddp.toml"
    path.write_text("x")
    os.chown(path, STRANGER, -1)
    trust.accept_file(path)
    os.chown(tmp_path / trust.RECORD, STRANGER, -1)
    with pytest.raises(UsageError, match=r"trusted.json is not used: it belongs to uid 54322"):
        trust.read_trusted(path)
