"""Sizes of logs are recorded while they grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.job.attempt_folder import NodeFolder
from hpc_ddp.node.watch import log_offsets
from hpc_ddp.node.watch.log_offsets import Growth
from unit.fakes import stop_clock
from unit.report.logs.fakes import Logs


def test_growing_logs_are_recorded(tmp_path: Path) -> None:
    logs = Logs(tmp_path).attempt(0)
    node = logs.run.attempt(0).node("a")
    node.path.mkdir()
    growth = Growth(node)
    growth.note()
    assert not node.printed.exists()
    for text, ranks in (("x\n", (0, 1)), ("y\n", (1,)), ("", (0, 1))):
        logs.say(text, *ranks, indexed=False)
        growth.note()
    assert [line.split()[1:] for line in node.printed.read_text().splitlines()] == [
        *(["0", "2"], ["1", "2"], ["1", "4"]),
    ]
    node.printed.unlink()
    node.printed.mkdir()  # a disk in trouble
    logs.say("z\n", 0, indexed=False)
    growth.note()


def test_no_link_is_followed_and_no_other_name_is_noted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever could write to the folder would have a line of theirs in a file of the user's."""
    (tmp_path / "node").mkdir()
    node = NodeFolder(tmp_path / "node")
    for name in ("rank-0\nrm -rf x #.log", "rank-x.log", "rank-1.log"):
        (node.path / name).write_text("text\n")
    secret, profile = tmp_path / "secret", tmp_path / "profile"
    secret.write_text("secret\n")
    profile.write_text("own\n")
    growth = Growth(node, shows_rank_0=True)
    growth.note_all()
    assert [line.split()[1:] for line in node.printed.read_text().splitlines()] == [["1", "5"]]
    node.printed.unlink()
    node.printed.symlink_to(profile)
    node.rank_log(0).symlink_to(secret)
    node.rank_log(1).write_text("more text\n")
    for _ in range(3):
        growth.note_all()
    assert (profile.read_text(), capfd.readouterr().out) == ("own\n", "")


def test_sizes_are_recorded_with_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = stop_clock(monkeypatch, log_offsets, now=5.0)
    node = NodeFolder(tmp_path)
    notes = Growth(node)
    notes.note()
    assert not node.printed.exists()
    for rank in (0, 1):
        node.rank_log(rank).write_text("abc")
    notes.note()
    notes.note()
    clock.now = 6.0
    node.rank_log(1).write_text("abcdef")
    notes.note()
    assert node.printed.read_text() == "5.000 0 3\n5.000 1 3\n6.000 1 6\n"
    node.rank_log(2).write_text("late")
    for _ in range(log_offsets.LIST_EVERY):
        notes.note()
    assert node.printed.read_text().endswith("6.000 1 6\n6.000 2 4\n")
    node.rank_log(0).unlink()
    notes.note()  # never raises
    alone = NodeFolder(tmp_path, 1)
    Growth(alone).note()
    assert alone.printed.read_text() == "6.000 1 6\n"


def test_the_more_nodes_there_are_the_more_seldom_notes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of nodes whose ranks have progress bars would open a file each second."""
    clock = stop_clock(monkeypatch, log_offsets, now=5.0)
    monkeypatch.setattr("random.random", lambda: 1.0)
    monkeypatch.setenv("HPC_DDP_NNODES", "1000")
    node = NodeFolder(tmp_path)
    notes = Growth(node)
    for _ in range(9):
        clock.now += 1
        with open(node.rank_log(0), "a") as file:
            file.write("a")
        notes.note()
    assert not node.printed.exists()
    clock.now += 1
    notes.note()  # nothing has grown, but some lines are due
    lines = node.printed.read_text().splitlines()
    assert lines == [f"{second + 5}.000 0 {second}" for second in range(1, 10)]
    node.rank_log(0).write_text("a" * 20)
    notes.note()
    assert len(node.printed.read_text().splitlines()) == 9
    notes.note_all()
    assert len(node.printed.read_text().splitlines()) == 10


def test_the_folder_is_listed_now_and_then_where_linux_tells_nothing(tmp_path: Path) -> None:
    node = NodeFolder(tmp_path)
    notes = Growth(node)
    notes._watch.close()
    node.rank_log(0).write_text("a")
    notes.note()
    node.rank_log(1).write_text("a worker that starts a moment later")
    notes.note()
    assert len(node.printed.read_text().splitlines()) == 2
    for _ in range(log_offsets.LIST_EVERY + 1):
        notes.note()
    node.rank_log(2).write_text("late")
    for _ in range(log_offsets.LIST_EVERY - 1):
        notes.note()
    assert len(node.printed.read_text().splitlines()) == 2
    notes.note()
    assert len(node.printed.read_text().splitlines()) == 3
    node.rank_log(3).write_text("last")
    notes.note_all()
    assert len(node.printed.read_text().splitlines()) == 4


def test_only_logs_that_have_changed_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    clock = stop_clock(monkeypatch, log_offsets)
    node = NodeFolder(tmp_path)
    for rank in (0, 1):
        node.rank_log(rank).write_text("a")
    notes = Growth(node, shows_rank_0=True)
    notes.note()

    def refuse(path: Path, *words: object) -> Any:
        raise AssertionError(f"a look at {path}")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse)
        patch.setattr(Path, "glob", refuse)
        patch.setattr(log_offsets.LogCopy, "copy_new", refuse)
        node.record.touch()
        notes.note()
        notes.note()
    node.rank_log(1).write_text("abc")
    with open(node.rank_log(0), "a") as file:
        file.write("b")
    node.rank_log(7).write_text("new")
    notes.note()
    assert [line.split()[1:] for line in node.printed.read_text().splitlines()] == [
        *(["0", "1"], ["1", "1"], ["0", "2"], ["1", "3"], ["7", "3"]),
    ]
    assert capfdbinary.readouterr().out == b"b"
    assert clock.slept == []


def test_a_disk_in_trouble_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    node = NodeFolder(tmp_path)
    notes = Growth(node, shows_rank_0=True)
    notes.note()
    node.rank_log(0).write_text("abc")

    def refuse(copy: log_offsets.LogCopy) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(log_offsets.LogCopy, "copy_new", refuse)
        notes.note()
    assert not node.printed.exists()
    notes.note()
    assert capfdbinary.readouterr().out == b"abc"
    assert node.printed.read_text().endswith(" 0 3\n")


@pytest.mark.parametrize("tells", [True, False])
def test_a_file_system_of_which_linux_tells_nothing_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    clock = stop_clock(monkeypatch, log_offsets)
    node = NodeFolder(tmp_path)
    node.rank_log(0).write_text("a")
    notes = Growth(node)
    notes.note()
    tell = notes._watch.take_changes
    monkeypatch.setattr(notes._watch, "take_changes", lambda: (tell() or set()) if tells else set())
    node.rank_log(0).write_text("ab")
    notes.note()
    assert node.printed.read_text().count("\n") == 1 + tells
    clock.now += log_offsets.CHECK_AFTER_S
    node.rank_log(0).write_text("abc")
    notes.note()
    assert node.printed.read_text().count("\n") == 2 + tells
    assert notes._watch.works is tells
