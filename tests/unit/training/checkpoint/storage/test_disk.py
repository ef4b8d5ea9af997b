"""Files of a checkpoint are written, published and removed durably."""

from __future__ import annotations

import errno
import os
import random
import zlib
from pathlib import Path

import pytest

from hpc_ddp.core import checkpoints
from hpc_ddp.core.checkpoints import FileFacts
from hpc_ddp.training.checkpoint.storage import disk
from tests.skips import skip_or_fail
from unit.training.checkpoint.fakes import names_in, write_draft


def test_space_and_inodes_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Space:
        f_blocks, f_bavail, f_frsize, f_files, f_favail = 10, 10, 100_000, 5, 3

    space = Space()
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    disk.check_space(tmp_path, 1_000_000, 3)
    with pytest.raises(OSError, match=r"No space left for 1\.1 MB: 1.0 MB are free") as caught:
        disk.check_space(tmp_path, 1_100_000, 3)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left for 4 files: 3 inodes"):
        disk.check_space(tmp_path, 1, 4)
    space.f_favail = -1  # as of CephFS
    disk.check_space(tmp_path, 1, 4)
    space.f_files = 0  # a file system that has no such count
    disk.check_space(tmp_path, 1, 4)
    space.f_blocks = space.f_bavail = 0  # or no sizes, as ramfs
    disk.check_space(tmp_path, 1, 4)


def test_an_existing_step_is_moved_aside(tmp_path: Path) -> None:
    disk.publish(write_draft(tmp_path, 3), 0)
    disk.publish(write_draft(tmp_path, 3, content=b"later"), 0)
    assert names_in(tmp_path) == ["step-3", "step-3.old-0"]
    (tmp_path / "step-3" / "state.pt").unlink()
    for _ in range(2):
        disk.intact.clear()  # as in another process
        disk.publish(write_draft(tmp_path, 3, 1), 1)
        (tmp_path / "step-3" / "state.pt").unlink()
    assert names_in(tmp_path) == ["step-3", "step-3.bad-1", "step-3.bad-1-1", "step-3.old-0"]


def test_drafts_are_cleared(tmp_path: Path) -> None:
    for name in ["step-1.tmp-0", "step-2.tmp-1", "step-2.tmp-11", "step-1"]:
        (tmp_path / name).mkdir()
    disk.clear_drafts(tmp_path)
    assert names_in(tmp_path) == ["step-1"]


def test_a_write_error_keeps_its_cause() -> None:
    with pytest.raises(OSError, match="No space left"):
        disk.write_file(Path("/dev/full"), bytes(9))
    with pytest.raises(OSError, match="No space left for 10000000000000"):
        disk.check_space(Path("/tmp"), 10**19, 1)
    disk.check_space(Path("/tmp"), 1, 1)


@pytest.mark.parametrize("size", [0, 1, checkpoints.CHUNK_BYTES, 2 * checkpoints.CHUNK_BYTES + 7])
def test_written_facts_are_size_and_crc32_of_the_file(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    facts = disk.write_file(tmp_path / "f", memoryview(content))
    assert facts == checkpoints.facts_of(tmp_path / "f") == FileFacts(size, zlib.crc32(content))
    assert (tmp_path / "f").read_bytes() == content


def test_a_failing_sync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        disk.write_file(tmp_path / "f", b"x")
    with pytest.raises(OSError, match="Input/output error"):
        disk.sync(tmp_path)


def test_folders_are_synced_before_and_after_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's folder is synced before it is published, and its parent afterwards."""
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", sync)
    disk.publish(write_draft(tmp_path, 3), 0)
    assert synced == ["state.pt", "manifest.json", "step-3.tmp-0", tmp_path.name]


def test_a_save_follows_no_link_in_its_draft(tmp_path: Path) -> None:
    """Where the group may write to the folder of checkpoints, a draft's name is foreseeable."""
    thesis, other = tmp_path / "thesis", tmp_path / "other"
    thesis.write_text("mine")
    other.mkdir()
    draft = disk.draft(tmp_path, 4, 0)
    draft.symlink_to(other)
    disk.make_draft(draft)
    assert not draft.is_symlink()
    assert draft.stat().st_mode & 0o777 == 0o700
    (draft / "rank-0.bin").symlink_to(thesis)
    with pytest.raises(OSError, match="symbolic link") as caught:
        disk.write_file(draft / "rank-0.bin", b"x")
    assert caught.value.errno == errno.ELOOP
    assert (thesis.read_text(), os.listdir(other)) == ("mine", [])
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    os.chown(draft, 54321, -1)
    disk.make_draft(draft)
    assert (os.listdir(draft), draft.stat().st_uid) == ([], os.geteuid())


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o700])
def test_a_checkpoint_has_the_rights_of_the_folder_around_it(tmp_path: Path, mode: int) -> None:
    draft = write_draft(tmp_path / "checkpoints", 4)
    draft.chmod(0o700)
    draft.parent.chmod(mode)
    assert disk.publish(draft, 0).stat().st_mode & 0o777 == mode
