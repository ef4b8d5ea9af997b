"""Linux tells which files of a folder have changed."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_ddp.node.watch import folder_watch
from hpc_ddp.node.watch.folder_watch import FolderWatch


def test_files_that_are_made_changed_and_renamed_are_named(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("x")
    watch = FolderWatch(tmp_path)
    assert watch.take_changes() == set()
    (tmp_path / "new \xe9\n").touch()
    with open(tmp_path / "old", "a") as file:
        file.write("y")
    (tmp_path / "new \xe9\n").rename(tmp_path / "final")
    (tmp_path / "old").read_text()
    assert watch.take_changes() == {"new \xe9\n", "old", "final"}
    assert watch.take_changes() == set()
    watch.close()
    assert (watch.works, watch.take_changes()) == (False, None)
    watch.close()


def test_lost_events_are_reported(tmp_path: Path) -> None:
    watch = FolderWatch(tmp_path)
    names: set[str] = set()
    change = folder_watch._HEAD.pack(1, folder_watch.MODIFY, 0, 16) + b"a".ljust(16, b"\0")
    lost = folder_watch._HEAD.pack(-1, folder_watch.OVERFLOW, 0, 0)
    assert watch._add_names(change, names)
    assert not watch._add_names(lost + change, names)
    assert names == {"a"}
    (tmp_path / "b").touch()
    assert watch.take_changes() == {"b"}


@pytest.mark.parametrize("answers", [(-1, 0), (None, -1)])
def test_a_kernel_that_refuses_gives_no_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: tuple[int | None, int]
) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    first = descriptor if answers[0] is None else answers[0]
    libc = SimpleNamespace(
        inotify_init1=lambda flags: first, inotify_add_watch=lambda *words: answers[1]
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    watch = FolderWatch(tmp_path)
    assert (watch.works, watch.take_changes()) == (False, None)
    if answers[0] is None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.close(descriptor)  # the watch has closed it
    else:
        os.close(descriptor)


def test_a_folder_that_is_missing_and_another_system_give_no_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not FolderWatch(tmp_path / "none").works
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not FolderWatch(tmp_path).works


def test_a_watch_that_nobody_has_any_more_is_closed(tmp_path: Path) -> None:
    """A user may have 128, and the tests of a supervisor alone make more."""
    watch = FolderWatch(tmp_path)
    path = f"/proc/self/fd/{watch._fd}"
    assert "inotify" in os.readlink(path)
    del watch
    assert not os.path.lexists(path) or "inotify" not in os.readlink(path)
