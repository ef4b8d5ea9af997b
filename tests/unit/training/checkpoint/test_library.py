"""A library's files become a checkpoint, or nothing."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint.library import LibraryCheckpoints
from hpc_ddp.training.checkpoint.schedule import Retention
from hpc_ddp.training.process.process_group import LoneControl
from unit.training.checkpoint.fakes import checkpoint_names, events_named


class TwoNodes(LoneControl):
    """The channel of rank 0 of two, the other of which sees another file of the draft."""

    world_size = 2

    def to_first(self, value: Any) -> list[Any]:
        return [value, {"of-rank-1": []} if isinstance(value, dict) else value]


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
    assert [row.bytes for row in checkpoints.health(run.checkpoints)] == [3, 3]


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


def test_a_file_of_another_node_counts_though_it_is_not_seen_here(run: RunFolder) -> None:
    """Rank 0 sums up the first of both names, and here there is no second rank."""
    assert not save(make_saver(run, TwoNodes()), 3, z=b"1")
    (failed,) = events_named(run, "save_failed")
    assert "of-rank-1" in failed["error"]


def test_another_librarys_checkpoint_is_refused(run: RunFolder) -> None:
    saver = make_saver(run)
    assert save(saver, 3, a=b"1")
    saver.library = "lightning"
    with pytest.raises(UsageError, match=r"has format 'dcp'; accepted: 'lightning'"):
        saver.find_newest_of_library()
