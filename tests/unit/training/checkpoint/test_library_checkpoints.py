"""A library's files become a checkpoint, or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint.library_checkpoints import LibraryCheckpoints
from hpc_ddp.training.checkpoint.storage.retention import Retention
from hpc_ddp.training.process.rank_messages import LoneControl
from unit.fakes import STRANGER
from unit.training.checkpoint.fakes import checkpoint_names, events_named


class TwoNodes(LoneControl):
    """The channel of rank 0 of two, the other of which sees another file of the draft."""

    world_size = 2

    def to_first(self, value: Any) -> list[Any]:
        return [value, ["of-rank-1"] if isinstance(value, list) else value]


def make_saver(run: RunFolder, background: LoneControl | None = None) -> LibraryCheckpoints:
    lone = LoneControl()
    journal = run.journal("rank-0")
    saver = LibraryCheckpoints(run, 0, lone, background or lone, journal, Retention(2))
    saver.library = "dcp"
    return saver


def save(saver: LibraryCheckpoints, step: int, **content: bytes) -> bool:
    draft = saver.open_draft(step)
    for name, text in content.items():
        path = draft / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    saver.commit(step, {"facts": {"a": step}}, began=0.0)
    is_saved = saver.settle()
    saver.tidy()
    return is_saved


def test_files_in_folders_are_published_and_verified(run: RunFolder) -> None:
    saver = make_saver(run)
    for step in (3, 5, 9):
        assert save(saver, step, a=b"1", state__model__b=b"22", state__c=b"")
    assert checkpoint_names(run) == ["step-5", "step-9"]
    newest = make_saver(run).find_newest_of_library()
    assert newest is not None
    folder, manifest = newest
    assert (folder.name, manifest["format"], manifest["facts"]) == ("step-9", "dcp", {"a": 9})
    assert sorted(manifest["files"]) == ["a", "state/c", "state/model/b"]
    assert [event["bytes"] for event in events_named(run, "checkpoint")] == [3, 3, 3]
    assert [row.bytes for row in checkpoints.verify_all(run.checkpoints)] == [3, 3]


def test_a_lost_folder_of_a_checkpoint_is_damage(run: RunFolder) -> None:
    saver = make_saver(run)
    assert save(saver, 3, a=b"1")
    assert save(saver, 5, a=b"1", state__model__b=b"22")
    shutil.rmtree(run.checkpoints / "step-5" / "state")
    assert checkpoints.find_damage(run.checkpoints / "step-5") == "state/model/b is missing"
    newest = make_saver(run).find_newest_of_library()
    assert newest is not None
    assert newest[0].name == "step-3"


def test_nothing_saved_is_a_failure(run: RunFolder) -> None:
    assert not save(make_saver(run), 3)
    assert checkpoint_names(run) == []
    (failed,) = events_named(run, "save_failed")
    assert "nothing was saved" in failed["error"]


def test_a_file_of_ours_alone_is_no_checkpoint(run: RunFolder) -> None:
    """The library has written elsewhere: good checkpoints must not give way to that."""
    saver = make_saver(run)
    saver.own_names = frozenset({"order"})
    assert save(saver, 3, a=b"1", order=b"2")
    assert not save(saver, 5, order=b"2")
    assert checkpoint_names(run) == ["step-3"]
    (failed,) = events_named(run, "save_failed")
    assert "nothing was saved" in failed["error"]


def test_a_file_of_another_node_counts_though_it_is_not_seen_here(run: RunFolder) -> None:
    """Rank 0 sums up the first of both names, and here there is no second rank."""
    assert not save(make_saver(run, TwoNodes()), 3, z=b"1")
    (failed,) = events_named(run, "save_failed")
    assert "of-rank-1" in failed["error"]


def test_files_are_listed_once_all_ranks_have_written_theirs(run: RunFolder) -> None:
    """A library writes by a draft and a rename: a name that is listed amid it is gone soon."""

    class SlowPeer(LoneControl):
        def barrier(self) -> None:
            path = run.checkpoints / "step-3.tmp-0" / ".tmp"
            path.rename(path.with_name("of-rank-1"))

    saver = make_saver(run, SlowPeer())
    assert save(saver, 3, a=b"1", **{".tmp": b"2"})
    files = checkpoints.read_manifest(run.checkpoints / "step-3")["files"]
    assert sorted(files) == ["a", "of-rank-1"]


def test_another_librarys_checkpoint_is_refused(run: RunFolder) -> None:
    saver = make_saver(run)
    assert save(saver, 3, a=b"1")
    saver.library = "lightning"
    with pytest.raises(UsageError, match=r"has format 'dcp'; accepted: 'lightning'"):
        saver.find_newest_of_library()


@pytest.fixture
def open_run(run: RunFolder) -> RunFolder:
    """A run that its owner has opened to a group."""
    run.whole.chmod(0o755)
    return run


@pytest.fixture
def group_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.fixture
def group_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_ddp.core.file_owners._is_private", lambda gid, uid: False)


def modes_of(folder: Path) -> set[int]:
    return {path.lstat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}


def newest_name(run: RunFolder) -> str:
    newest = make_saver(run).find_newest_of_library()
    assert newest is not None
    return newest[0].name


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")


def test_whatever_the_umask_others_write_no_checkpoint(
    open_run: RunFolder, group_umask: None, group_of_many: None
) -> None:
    saver = make_saver(open_run)
    draft = saver.open_draft(3)
    assert draft.stat().st_mode & 0o777 == 0o700  # while the library writes
    assert save(saver, 3, a=b"1", state__b=b"2")
    assert modes_of(open_run.checkpoints / "step-3") == {0o755, 0o644}
    assert newest_name(open_run) == "step-3"


@pytest.mark.parametrize("name", [".", "step-3", "step-3/a", "step-3/state", "step-3/state/b"])
def test_a_checkpoint_that_others_can_write_is_refused(
    open_run: RunFolder, name: str, group_of_many: None
) -> None:
    assert save(make_saver(open_run), 3, a=b"1", state__b=b"2")
    path = open_run.checkpoints / name
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(HpcDdpError, match="step-3 is not loaded: other users can write") as refusal:
        make_saver(open_run).find_newest_of_library()
    assert str(path) in refusal.value.message
    assert f"chmod -R go-w {open_run.checkpoints}" in str(refusal.value.hint)
    assert checkpoint_names(open_run) == ["step-3"]
    open_run.whole.chmod(0o700)  # as a start does; others may have written in it before
    with pytest.raises(HpcDdpError, match="step-3 is not loaded"):
        make_saver(open_run).find_newest_of_library()
    path.chmod(path.stat().st_mode & ~0o020)
    assert newest_name(open_run) == "step-3"


def test_checkpoints_in_the_folder_of_another_user_are_refused(open_run: RunFolder) -> None:
    needs_root()
    assert save(make_saver(open_run), 3, a=b"1")
    os.chown(open_run.checkpoints, STRANGER, -1)
    with pytest.raises(HpcDdpError, match="another user owns") as refusal:
        make_saver(open_run).find_newest_of_library()
    assert "cp -r" in str(refusal.value.hint)  # that user can't change modes there


@pytest.mark.parametrize("name", ["step-9", "step-9/b", "step-9/link"])
def test_a_checkpoint_of_another_user_is_passed_over(
    run: RunFolder, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_root()
    saver = make_saver(run)
    assert save(saver, 3, a=b"1")
    assert save(saver, 9, a=b"1", b=b"2")
    (run.checkpoints / "step-9" / "link").symlink_to("a")
    os.chown(run.checkpoints / name, STRANGER, -1, follow_symlinks=False)
    assert newest_name(run) == "step-3"
    printed = capsys.readouterr().err
    assert f"PASSED OVER the checkpoint step-9: {name} belongs to uid {STRANGER}" in printed
    assert "cp -r" in printed
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-3", "step-9.bad-0"]


def test_a_copy_of_another_users_checkpoint_can_be_used(run: RunFolder) -> None:
    needs_root()
    assert save(make_saver(run), 9, a=b"1")
    os.chown(run.checkpoints / "step-9", STRANGER, -1)
    with pytest.raises(HpcDdpError, match="no good checkpoint any more"):
        make_saver(run).find_newest_of_library()
    shutil.copytree(run.checkpoints / "step-9.bad-0", run.checkpoints / "step-9")
    assert newest_name(run) == "step-9"


def test_checkpoints_in_a_folder_of_another_user_are_refused(run: RunFolder) -> None:
    needs_root()
    assert save(make_saver(run), 3, a=b"1")
    os.chown(run.checkpoints, STRANGER, -1)
    with pytest.raises(HpcDdpError, match="step-3 is not loaded"):
        make_saver(run).find_newest_of_library()


def test_a_link_to_nowhere_is_damage_as_ever(run: RunFolder) -> None:
    assert save(make_saver(run), 3, a=b"1")
    (run.checkpoints / "step-9").symlink_to("nowhere")
    assert newest_name(run) == "step-3"
