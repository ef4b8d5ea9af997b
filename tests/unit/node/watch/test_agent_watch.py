"""A torchrun without workers is given time, and no more than that."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_ddp.core import process
from hpc_ddp.core.job.attempt_folder import AttemptFolder, NodeFolder
from hpc_ddp.node.watch.agent_watch import LOOK_EVERY_S, MOST_LOOKS, AgentWatch


@pytest.fixture
def folder(attempt: AttemptFolder) -> NodeFolder:
    node = attempt.node("n1")
    node.path.mkdir(parents=True)
    return node


def looks_until_idle(watch: AgentWatch) -> int | None:
    """Return after how many looks an agent counts as idle, None where it does not."""
    idle = [watch.is_idle(number * LOOK_EVERY_S) for number in range(2 * MOST_LOOKS)]
    return idle.index(True) + 1 if True in idle else None


def write_pid(folder: NodeFolder, rank: int, pid: int) -> None:
    (folder.path / f"rank-{rank}.pid").write_text(f"{pid} {process._began(pid)}")


def test_an_agent_is_idle_when_its_workers_have_ended(folder: NodeFolder) -> None:
    assert looks_until_idle(AgentWatch(folder)) is None  # none has started: a rendezvous is slow
    (folder.path / "rank-0.pid").write_text("4194305 then")
    assert looks_until_idle(AgentWatch(folder)) == MOST_LOOKS
    write_pid(folder, 1, os.getpid())
    assert looks_until_idle(AgentWatch(folder)) is None


def test_a_worker_that_is_started_again_ends_the_count(folder: NodeFolder) -> None:
    (folder.path / "rank-0.pid").write_text("4194305 then")
    watch = AgentWatch(folder)
    for number in range(MOST_LOOKS - 1):
        assert not watch.is_idle(number * LOOK_EVERY_S)
    write_pid(folder, 0, os.getpid())
    assert not watch.is_idle((MOST_LOOKS - 1) * LOOK_EVERY_S)
    (folder.path / "rank-0.pid").write_text("4194305 then")
    assert not watch.is_idle(MOST_LOOKS * LOOK_EVERY_S)


def test_a_worker_that_can_not_be_seen_may_run(folder: NodeFolder) -> None:
    (folder.path / "rank-0.pid").write_text("4194305 then pid:[1]")
    assert looks_until_idle(AgentWatch(folder)) is None


def test_a_disk_that_is_away_says_nothing(tmp_path: Path) -> None:
    assert looks_until_idle(AgentWatch(AttemptFolder(tmp_path / "gone").node("n1"))) is None


def test_a_supervisor_of_one_worker_has_no_agent(folder: NodeFolder) -> None:
    (folder.path / "rank-0.pid").write_text("4194305 then")
    assert looks_until_idle(AgentWatch(replace(folder, rank=0))) is None
