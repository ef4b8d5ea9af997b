"""Sizes of logs are recorded while they grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.core.job.attempt_folder import NodeFolder
from hpc_ddp.node import log_offsets
from hpc_ddp.node.log_offsets import Growth
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


def test_the_folder_is_listed_now_and_then(tmp_path: Path) -> None:
    node = NodeFolder(tmp_path)
    notes = Growth(node)
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
