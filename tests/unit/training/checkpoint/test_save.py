"""Checkpoints are written, reported and pruned by one rank; see tests/ddp for several."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core import checkpoints
from hpc_ddp.core.checkpoints import FileFacts
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint import save as saver_module
from hpc_ddp.training.checkpoint.rank_comparison import Inventory
from hpc_ddp.training.checkpoint.rank_part import Written
from hpc_ddp.training.checkpoint.save import Failure, Outcome, SupersededError
from hpc_ddp.training.checkpoint.storage import disk, retention
from hpc_ddp.training.checkpoint.storage.index import PAGE, Claim
from hpc_ddp.training.checkpoint.storage.retention import Retention
from tests.waiting import LIMIT_S
from unit.fakes import Clock
from unit.training.checkpoint.fakes import (
    LoneRank,
    Make,
    break_publishing,
    buffer_of,
    checkpoint_names,
    content_of,
    events_named,
    save_steps,
)

NOTHING = Written(FileFacts(0, 0), None, {})  # a peer's answer


def test_the_best_checkpoint_stays(run: RunFolder, make: Make) -> None:
    saver = make(Retention(1))
    save_steps(saver, 3, facts={"best": {"step": 3}})
    save_steps(saver, 5, 7, facts={"best": {"step": 3}})
    assert checkpoint_names(run) == ["step-3", "step-7"]


def test_a_save_is_in_flight_until_it_is_durable(run: RunFolder, make: Make) -> None:
    hold, saver = threading.Event(), make()
    saver.before_publishing = lambda step: hold.wait(60)  # type: ignore[assignment]
    assert (saver.in_flight, saver.failed) == (False, False)  # nothing was begun
    saver.begin(content_of(3))
    assert (saver.in_flight, saver.failed) == (True, False)
    hold.set()
    assert saver.settle()
    assert (saver.in_flight, saver.failed) == (False, False)


def test_time_that_a_step_waits_for_a_save_is_stall(run: RunFolder, make: Make) -> None:
    saver = make()
    saver.stall_s = 0.25
    saver._awaited_since = saver_module.time.monotonic() - 5  # type: ignore[attr-defined]
    saver._outcome = Outcome(10)
    saver._report(content_of(3), 1.23456)
    (event,) = events_named(run, "checkpoint")
    assert (event["write_s"], event["bytes"]) == (1.2346, 10)
    assert 5.25 <= event["stall_s"] < 60


def test_a_non_finite_state_is_not_published(run: RunFolder, make: Make) -> None:
    saver = make()
    save_steps(saver, 3)
    saver.begin(content_of(5, buffer=buffer_of(is_finite=False)))
    with pytest.raises(HpcDdpError, match="at or before step 5; last checkpoint: step-3"):
        saver.settle()
    assert checkpoint_names(run) == ["step-3"]


def test_an_error_of_rank_0s_decision_reaches_all_ranks(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> HpcDdpError:
        raise OSError("disk away")

    monkeypatch.setattr(saver_module, "non_finite_error", fail)
    saver = make()
    assert save_steps(saver, 5, buffer=buffer_of(is_finite=False)) == [False]
    assert saver._outcome.failure == "rank 0: disk away"
    assert checkpoint_names(run) == []


def test_a_superseded_attempt_publishes_nothing(run: RunFolder, make: Make) -> None:
    saver = make()
    run.claim_attempt({}, lambda identity: False)
    saver.begin(content_of(3))
    with pytest.raises(SupersededError, match=r"attempt 0 of .* has been superseded"):
        saver.settle()
    assert saver.failed
    assert checkpoint_names(run) == []


def test_saves_that_keep_failing_end_the_run(
    run: RunFolder, make: Make, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = make()
    break_publishing(saver, OSError("disk away"))
    assert save_steps(saver, 1, 2, 3, 4) == [False] * 4  # in no time
    assert saver.settle()  # nothing has begun since
    assert saver.failed
    assert events_named(run, "save_failed")[0]["error"] == "rank 0: disk away"
    sentence = "the checkpoint of step 1 could not be saved (rank 0: disk away)"
    assert sentence in capsys.readouterr().err
    break_publishing(saver, None)
    assert save_steps(saver, 5) == [True]
    break_publishing(saver, OSError("disk away"))
    assert save_steps(saver, 6) == [False]
    clock.now += 30.0
    assert save_steps(saver, 7) == [False]  # the second in a row
    with pytest.raises(HpcDdpError, match=r"3 saves in a row failed in .*: rank 0: disk") as end:
        save_steps(saver, 8)
    assert f"df -h {run.path}; df -i {run.path}" in (end.value.hint or "")
    assert checkpoint_names(run) == ["step-5"]


def test_ranks_that_can_not_agree_on_three_saves_end_the_run(make: Make) -> None:
    class Broken(LoneRank):
        def to_first(self, value: Any) -> list[Any]:
            raise RuntimeError("peer gone")

    saver = make(background=Broken())
    assert save_steps(saver, 1, 2) == [False, False]
    with pytest.raises(HpcDdpError, match="the ranks could not agree: peer gone"):
        save_steps(saver, 3)


def test_a_failure_on_another_rank_fails_the_save(run: RunFolder, make: Make) -> None:
    background = LoneRank()
    saver = make(background=background)
    background.peers = [Failure(None, "no such file")]
    assert save_steps(saver, 1) == [False]
    background.peers = [NOTHING]
    background.claims = [Failure(None, "no copy")]
    assert save_steps(saver, 2) == [False]
    errors = [event["error"] for event in events_named(run, "save_failed")]
    assert errors == ["rank 1: no such file", "rank 1: no copy"]
    background.claims = []
    assert save_steps(saver, 3) == [True]
    background.peers = ["non-finite"]
    with pytest.raises(HpcDdpError, match="NaN"):
        save_steps(saver, 4)
    assert checkpoint_names(run) == ["step-3"]


def test_ranks_whose_tensors_do_not_fit_together_write_nothing(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *content: object) -> None:
        raise AssertionError("it was written")

    monkeypatch.setattr(disk, "write_file", refuse)
    different = Inventory(0, {"model.w": (4,)}, {"model.w": 4})
    background = LoneRank()
    background.inventories = [different]
    saver = make(background=background)
    for _ in range(2):  # no later try ends otherwise
        with pytest.raises(HpcDdpError, match=r"rank 1 has other tensors .* rank 0: model\.w"):
            save_steps(saver, 1)
    assert saver.failed
    assert checkpoint_names(run) == []
    assert "model.w" in events_named(run, "save_failed")[0]["error"]


@pytest.mark.parametrize(
    ("error", "remaining"),
    [
        (errno.ENOSPC, ["step-1", "step-3", "step-4"]),
        (errno.EDQUOT, ["step-1", "step-3", "step-4"]),
        (errno.EIO, ["step-1", "step-2", "step-3", "step-4"]),
    ],
)
def test_a_full_disk_costs_old_checkpoints_and_no_milestone(
    run: RunFolder, make: Make, error: int, remaining: list[str]
) -> None:
    """The error code counts, not the system's text for it."""
    background = LoneRank()
    saver = make(Retention(9, every=4), background)
    save_steps(saver, 1, 2, 3, 4)
    background.peers = [Failure(error, "Kein Platz")]
    assert save_steps(saver, 5) == [False]
    assert checkpoint_names(run) == remaining


def test_the_best_checkpoint_stays_where_a_better_one_finds_no_room(
    run: RunFolder, make: Make
) -> None:
    background = LoneRank()
    saver = make(Retention(9), background)
    save_steps(saver, 1, 2, 3, 4, facts={"best": {"step": 1}})
    background.peers = [Failure(errno.ENOSPC, "No space left")]
    assert save_steps(saver, 5, facts={"best": {"step": 5}}) == [False]
    assert checkpoint_names(run) == ["step-1", "step-3", "step-4"]
    (run.checkpoints / "step-4" / "manifest.json").write_text("{")
    assert retention.best_steps(run.checkpoints) == []


def test_the_peers_get_an_answer_where_no_room_can_be_made(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = LoneRank()
    saver = make(Retention(9), background)
    save_steps(saver, 1, 2, 3)

    def gone(run: RunFolder, attempt: int) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(RunFolder, "is_newest", gone)
    background.peers = [Failure(errno.ENOSPC, "No space left")]
    assert save_steps(saver, 4) == [False]
    assert "rank 1: No space left" in events_named(run, "save_failed")[0]["error"]
    assert checkpoint_names(run) == ["step-1", "step-2", "step-3"]


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Have a disk of 15,000 bytes, on which a checkpoint takes 2,000, as does a parcel; return what
    is asked for."""
    requests: list[tuple[int, int]] = []

    def check(draft: Path, size: int, files: int) -> None:
        requests.append((size, files))
        taken = [*checkpoints.published(draft.parent), *draft.parent.parent.glob("stage")]
        if size + 2000 * len(taken) > 15000:
            raise OSError(errno.ENOSPC, f"No space left for {size} bytes")

    monkeypatch.setattr(disk, "check_space", check)
    return requests


def test_old_checkpoints_are_removed_before_the_disk_is_full(
    run: RunFolder, make: Make, space: list[tuple[int, int]]
) -> None:
    """Milestones and the two newest stay; where that is too much, the save is refused."""
    background = LoneRank()
    saver = make(Retention(9, every=3), background)
    assert save_steps(saver, 1, 2, 3, 4) == [True] * 4
    background.peers = [NOTHING]
    background.claims = [Claim(tensors=1000)]
    assert save_steps(saver, 5) == [True]
    assert checkpoint_names(run) == ["step-1", "step-3", "step-4", "step-5"]
    background.claims = [Claim(tensors=5000)]
    assert save_steps(saver, 6) == [False]
    assert "No space left for" in events_named(run, "save_failed")[0]["error"]
    assert checkpoint_names(run) == ["step-1", "step-3", "step-4", "step-5"]


def test_a_disk_that_does_not_answer_costs_no_old_checkpoint(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = LoneRank()
    saver = make(Retention(9), background)
    assert save_steps(saver, 1, 2, 3) == [True] * 3

    def check(draft: Path, size: int, files: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "check_space", check)
    run.parcel.mkdir()
    background.peers = [NOTHING]
    background.claims = [Claim(tensors=1000)]
    assert save_steps(saver, 4) == [False]
    assert checkpoint_names(run) == ["step-1", "step-2", "step-3"]
    assert run.parcel.exists()


@pytest.mark.parametrize("is_seen_before", [True, False])
def test_a_parcel_gives_way_before_checkpoints_do(
    run: RunFolder, make: Make, space: list[tuple[int, int]], is_seen_before: bool
) -> None:
    """Whether the size of the disk or a rank's write shows that it is full."""
    background = LoneRank()
    saver = make(Retention(9), background)
    save_steps(saver, 1, 2, 3)
    run.parcel.mkdir()
    (run.parcel / "environment-1").touch()
    background.peers = [NOTHING if is_seen_before else Failure(errno.EDQUOT, "Quota exceeded")]
    background.claims = [Claim(tensors=1000 if is_seen_before else 0)]
    assert save_steps(saver, 4) == [is_seen_before]
    assert not run.parcel.exists()
    assert "no room for a checkpoint" in run.unstaged.read_text()
    assert checkpoint_names(run)[:3] == ["step-1", "step-2", "step-3"]  # as `Retention` has it


def test_space_is_checked_once_for_the_bytes_of_all_ranks(
    run: RunFolder, make: Make, space: list[tuple[int, int]]
) -> None:
    background = LoneRank()
    background.peers = [NOTHING] * 3
    background.claims = [Claim(tensors=size) for size in (70, 0, 5)]
    save_steps(make(background=background), 1, buffer=buffer_of(b"x" * 400, b"x" * 600))
    size = (run.checkpoints / "step-1" / "rank-0.bin").stat().st_size
    assert space == [(size + 2 * PAGE, 4 + 2)]


def test_a_save_without_a_waiting_step_adds_no_stall(run: RunFolder, make: Make) -> None:
    saver = make()
    save_steps(saver, 3, buffer=buffer_of(copy_s=0.5))  # a device was busy for half a second
    saver._outcome = Outcome(10)
    saver._awaited_since = None
    saver._report(content_of(3), 1.0)
    event = events_named(run, "checkpoint")[-1]
    assert event["stall_s"] == saver.stall_s == 0.75


def test_time_that_the_training_waits_for_publishing_is_stall(
    run: RunFolder, make: Make, clock: Clock
) -> None:
    saver = make()

    def linger(step: int) -> None:
        limit = time.monotonic() + LIMIT_S
        while saver._awaited_since is None and time.monotonic() < limit:
            os.sched_yield()
        clock.now += 5.0

    saver.before_publishing = linger
    assert save_steps(saver, 1) == [True]
    (event,) = events_named(run, "checkpoint")
    assert (event["stall_s"], event["write_s"]) == (5.25, 5.0)


def test_a_save_begins_once_the_old_ones_are_removed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    again = threading.Event()

    def prune(folder: Path, keep: Retention, pinned: list[int]) -> None:
        again.wait(0.2)  # for what must not come
        steps.append(f"removed after {pinned[0]}")

    def publish(step: int) -> None:
        steps.append(f"saved {step}")
        if step == 2:
            again.set()

    monkeypatch.setattr(retention, "prune", prune)
    saver = make()
    saver.before_publishing = publish
    for step in (1, 2):
        saver.begin(content_of(step))
        assert saver._thread is not None
        assert saver._thread.daemon  # it does not hold up the end of a process that has failed
        assert saver.settle()
    saver.tidy()
    assert steps == ["saved 1", "removed after 1", "saved 2", "removed after 2"]


@pytest.mark.parametrize(("rank", "removed"), [(0, [1]), (1, [])])
def test_rank_0_alone_removes_old_checkpoints(
    make: Make, monkeypatch: pytest.MonkeyPatch, rank: int, removed: list[int]
) -> None:
    class Ranked(LoneRank):
        """A rank among two, to which rank 0 says that the save is good."""

        world_size = 2

        def from_first(self, value: Any) -> Any:
            return answers.pop(0) if rank else value

        def to_first(self, value: Any) -> list[Any]:
            return [] if rank else [value, value]

    Ranked.rank = rank
    answers = [None, True, Outcome(1)]
    steps: list[int] = []
    monkeypatch.setattr(retention, "prune", lambda folder, keep, pinned: steps.append(pinned[0]))
    saver = make(background=Ranked())
    saver.begin(content_of(1))
    saver.settle()
    saver.tidy()
    assert steps == removed


def test_a_save_accepts_an_existing_folder_and_a_missing_parent(run: RunFolder, make: Make) -> None:
    saver = make()
    disk.draft(run.checkpoints, 1, 0).mkdir()  # by a rank that was quicker
    assert save_steps(saver, 1) == [True]
    shutil.rmtree(run.checkpoints)
    assert save_steps(saver, 2) == [True]
    assert checkpoint_names(run) == ["step-2"]
