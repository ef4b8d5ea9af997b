"""Saving and restoring by one rank, without a process group; see tests/ddp for several."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpc_ddp.cli import jobs
from hpc_ddp.core import checkpoints, file_io
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint import disk, schedule
from hpc_ddp.training.checkpoint import manager as manager_module
from hpc_ddp.training.checkpoint import saver as saver_module
from hpc_ddp.training.checkpoint.manager import CheckpointManager
from hpc_ddp.training.checkpoint.rank_comparison import Digest, Inventory
from hpc_ddp.training.checkpoint.restorer import Restored, open_checkpoint
from hpc_ddp.training.checkpoint.saver import (
    Checkpoints,
    Claim,
    Content,
    Failure,
    Outcome,
    SupersededError,
)
from hpc_ddp.training.checkpoint.schedule import Retention
from hpc_ddp.training.checkpoint.shards import Reader
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.export import export
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.mesh import ParallelDims
from tests.raw_events import raw_events
from tests.waiting import LIMIT_S
from unit.fakes import Clock, stop_clock

CPU = torch.device("cpu")


class Alone:
    """The talk of a world of one rank. `peers` are the answers of others, if there are some,
    `claims` what they are about to write, and `inventories` their tensors."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.peers: list[Any] = []
        self.claims: list[Any] = []
        self.inventories: list[Inventory] = []

    def from_first(self, value: Any) -> Any:
        return value

    def to_first(self, value: Any) -> list[Any]:
        if isinstance(value, Claim):
            return [value, *(self.claims or [value] * len(self.peers))]
        if isinstance(value, Inventory):
            return [value, *self.inventories]
        if isinstance(value, Digest):
            return [value, *(inventory.digest for inventory in self.inventories)]
        return [value, *self.peers]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "run").make()
    run.claim_attempt({}, lambda info: False)
    return run


Make = Callable[..., Checkpoints]


@pytest.fixture
def make(run: RunFolder) -> Make:
    def build(keep: Retention | None = None, background: Any = None) -> Checkpoints:
        control, background = cast(Any, Alone()), cast(Any, background or Alone())
        journal = run.journal("rank-0")
        return Checkpoints(run, 0, control, background, journal, keep or Retention(2))

    return build


def _buffer(*content: bytes, copy_s: float = 0.0, is_finite: bool = True) -> Any:
    """Return what holds these bytes, and was copied by a device in this time."""
    return SimpleNamespace(bytes=content, wait=lambda: copy_s, is_finite=lambda names: is_finite)


def _content(step: int, **values: Any) -> Content:
    fields: dict[str, Any] = {
        **{"facts": {"epoch": 1, "best": None}, "shared": {"tree": {"a": step}}},
        **{"rank_values": {"rank": 0, "pieces": {}}, "buffer": _buffer(), "trained": set()},
        **{"inventory": lambda: Inventory(0, {}), "stall_s": 0.25},
    }
    return Content(step, **{**fields, **values})


def _save(saver: Checkpoints, *steps: int, **values: Any) -> list[bool]:
    settled = []
    for step in steps:
        saver.begin(_content(step, **values))
        settled.append(saver.settle())
        saver.tidy()
    return settled


def _names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def _events(run: RunFolder, name: str) -> list[dict[str, Any]]:
    return [event for event in raw_events(run.path) if event["event"] == name]


# --- saving --------------------------------------------------------------------------------


def test_what_is_saved_is_restored(run: RunFolder, make: Make) -> None:
    saver = make()
    assert saver.settle()  # nothing was begun
    assert _save(saver, 3, 5, 9) == [True] * 3
    assert _names(run) == ["step-5", "step-9"]
    manifest = checkpoints.read_manifest(run.checkpoints / "step-9")
    assert (manifest["step"], manifest["world_size"], manifest["epoch"]) == (9, 1, 1)
    assert sorted(manifest["files"]) == ["rank-0.pt", "state.pt"]
    saved = _events(run, "checkpoint")[-1]
    size = sum(item["size"] for item in manifest["files"].values())
    assert (saved["step"], saved["bytes"]) == (9, size)
    assert 0.25 <= saved["stall_s"] <= 0.25 + saved["write_s"] + 0.1
    assert saver.stall_s == 0.25
    assert saver.slowest_save_s >= 0.25
    restored = make().restore()
    assert restored is not None
    assert (restored.step, restored.shared) == (9, {"tree": {"a": 9}})
    assert list(restored.ranks) == [0]


def test_the_best_checkpoint_stays(run: RunFolder, make: Make) -> None:
    saver = make(Retention(1))
    _save(saver, 3, facts={"best": {"step": 3}})
    _save(saver, 5, 7, facts={"best": {"step": 3}})
    assert _names(run) == ["step-3", "step-7"]


def test_a_save_is_in_flight_until_it_is_durable(run: RunFolder, make: Make) -> None:
    hold, saver = threading.Event(), make()
    saver.before_publishing = lambda step: hold.wait(60)  # type: ignore[assignment]
    assert (saver.in_flight, saver.failed) == (False, False)  # nothing was begun
    saver.begin(_content(3))
    assert (saver.in_flight, saver.failed) == (True, False)
    hold.set()
    assert saver.settle()
    assert (saver.in_flight, saver.failed) == (False, False)


def test_a_save_that_a_step_waits_for_is_a_stall(run: RunFolder, make: Make) -> None:
    saver = make()
    saver.stall_s = 0.25
    saver._awaited_since = saver_module.time.monotonic() - 5  # type: ignore[attr-defined]
    saver._outcome = Outcome(10)
    saver._report(_content(3), 1.23456)
    (event,) = _events(run, "checkpoint")
    assert (event["write_s"], event["bytes"]) == (1.2346, 10)
    assert 5.25 <= event["stall_s"] < 60


def test_what_is_not_finite_is_not_published(run: RunFolder, make: Make) -> None:
    saver = make()
    _save(saver, 3)
    saver.begin(_content(5, buffer=_buffer(is_finite=False)))
    with pytest.raises(HpcDdpError, match="at or before step 5; last checkpoint: step-3"):
        saver.settle()
    assert _names(run) == ["step-3"]


def test_an_error_of_rank_0s_decision_reaches_all_ranks(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> HpcDdpError:
        raise OSError("disk away")

    monkeypatch.setattr(saver_module, "non_finite_error", fail)
    saver = make()
    assert _save(saver, 5, buffer=_buffer(is_finite=False)) == [False]
    assert saver._outcome.failure == "rank 0: disk away"
    assert _names(run) == []


def test_a_later_attempt_is_not_written_over(run: RunFolder, make: Make) -> None:
    saver = make()
    run.claim_attempt({}, lambda info: False)
    saver.begin(_content(3))
    with pytest.raises(SupersededError, match=r"attempt 0 of .* has been superseded"):
        saver.settle()
    assert saver.failed
    assert _names(run) == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = stop_clock(monkeypatch, saver_module)
    return clock


def _break(saver: Checkpoints, error: Exception | None) -> None:
    def fail(step: int) -> None:
        if error:
            raise error

    saver.before_publishing = fail


def test_failures_that_last_end_the_run(
    run: RunFolder, make: Make, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = make()
    _break(saver, OSError("disk away"))
    assert _save(saver, 1, 2, 3, 4) == [False] * 4  # in no time
    assert saver.settle()  # nothing has begun since
    assert saver.failed
    assert _events(run, "save_failed")[0]["error"] == "rank 0: disk away"
    said = "the checkpoint of step 1 could not be saved (rank 0: disk away)"
    assert said in capsys.readouterr().err
    _break(saver, None)
    assert _save(saver, 5) == [True]
    _break(saver, OSError("disk away"))
    assert _save(saver, 6) == [False]
    clock.now += 30.0
    assert _save(saver, 7) == [False]  # the second in a row
    with pytest.raises(HpcDdpError, match=r"3 saves in a row failed in .*: rank 0: disk away"):
        _save(saver, 8)
    assert _names(run) == ["step-5"]


def test_ranks_that_can_not_agree_have_failed_for_long(make: Make) -> None:
    class Broken(Alone):
        def to_first(self, value: Any) -> list[Any]:
            raise RuntimeError("peer gone")

    saver = make(background=Broken())
    assert _save(saver, 1, 2) == [False, False]
    with pytest.raises(HpcDdpError, match="the ranks could not agree: peer gone"):
        _save(saver, 3)


def test_what_the_other_ranks_answer_counts(run: RunFolder, make: Make) -> None:
    background = Alone()
    saver = make(background=background)
    background.peers = [Failure(None, "no such file")]
    assert _save(saver, 1) == [False]
    background.peers = [{}]
    background.claims = [Failure(None, "no copy")]
    assert _save(saver, 2) == [False]
    errors = [event["error"] for event in _events(run, "save_failed")]
    assert errors == ["rank 1: no such file", "rank 1: no copy"]
    background.claims = []
    assert _save(saver, 3) == [True]
    background.peers = ["non-finite"]
    with pytest.raises(HpcDdpError, match="NaN"):
        _save(saver, 4)
    assert _names(run) == ["step-3"]


def test_ranks_whose_tensors_do_not_fit_together_write_nothing(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *content: object) -> None:
        raise AssertionError("it was written")

    monkeypatch.setattr(disk, "write_file", refuse)
    other = Inventory(0, {"model.w": (4,)}, {"model.w": 4})
    background = Alone()
    background.inventories = [other]
    saver = make(background=background)
    for _ in range(2):  # no later try ends otherwise
        with pytest.raises(HpcDdpError, match=r"rank 1 has other tensors .* rank 0: model\.w"):
            _save(saver, 1)
    assert saver.failed
    assert _names(run) == []
    assert "model.w" in _events(run, "save_failed")[0]["error"]


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (errno.ENOSPC, ["step-1", "step-3", "step-4"]),
        (errno.EDQUOT, ["step-1", "step-3", "step-4"]),
        (errno.EIO, ["step-1", "step-2", "step-3", "step-4"]),
    ],
)
def test_a_full_disk_costs_old_checkpoints_and_no_milestone(
    run: RunFolder, make: Make, error: int, left: list[str]
) -> None:
    """Whatever the system calls the error on the rank that it befalls."""
    background = Alone()
    saver = make(Retention(9, every=4), background)
    _save(saver, 1, 2, 3, 4)
    background.peers = [Failure(error, "Kein Platz")]
    assert _save(saver, 5) == [False]
    assert _names(run) == left


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Have a disk of 9,600 bytes, on which a checkpoint takes 2,000; return what is asked for."""
    asked: list[tuple[int, int]] = []

    def check(made: Path, size: int, files: int) -> None:
        asked.append((size, files))
        if size + 2000 * len(checkpoints.published(made.parent)) > 9600:
            raise OSError(errno.ENOSPC, f"No space left for {size} bytes")

    monkeypatch.setattr(disk, "check_space", check)
    return asked


def test_room_is_made_before_it_is_written(
    run: RunFolder, make: Make, space: list[tuple[int, int]]
) -> None:
    """Milestones and the two newest stay; where that is too much, the save is refused."""
    background = Alone()
    saver = make(Retention(9, every=3), background)
    assert _save(saver, 1, 2, 3, 4) == [True] * 4
    background.peers = [{}]
    background.claims = [Claim(1000, 1)]
    assert _save(saver, 5) == [True]
    assert _names(run) == ["step-1", "step-3", "step-4", "step-5"]
    background.claims = [Claim(1500, 1)]
    assert _save(saver, 6) == [False]
    assert "No space left for" in _events(run, "save_failed")[0]["error"]
    assert _names(run) == ["step-1", "step-3", "step-4", "step-5"]


def test_space_is_looked_for_once_and_for_what_ranks_really_write(
    run: RunFolder, make: Make, space: list[tuple[int, int]]
) -> None:
    background = Alone()
    background.peers = [{}] * 3
    background.claims = [Claim(size, 2) for size in (70, 0, 5)]
    own = {"rank": 0, "pieces": [("x", "uint8", (1000,), (0,), (1000,), 0)]}
    _save(
        make(background=background),
        1,
        buffer=_buffer(b"x" * 400, b"x" * 600),
        rank_values=own,
    )
    folder = run.checkpoints / "step-1"
    size = sum(
        (folder / name).stat().st_size for name in ("rank-0.pt", "state.pt", "tensors-0.bin")
    )
    assert space == [(size + 75, 3 + 6 + 1)]


# --- restoring -----------------------------------------------------------------------------


def test_a_run_without_checkpoints_begins(run: RunFolder, make: Make) -> None:
    (run.checkpoints / "step-1.tmp-0").mkdir()
    assert make().restore() is None
    assert _names(run) == []
    assert _events(run, "restored") == []


Finding = str | OSError | None


def _find(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> list[str]:
    """Have verifications end like this in turn; return the folders that they were of."""
    answers, names = iter(findings), []

    def find_damage(folder: Path, rank: int, world_size: int) -> str | None:
        names.append(folder.name)
        assert (rank, world_size) == (0, 1)
        finding = next(answers)
        if isinstance(finding, OSError):
            raise finding
        return finding

    monkeypatch.setattr(checkpoints, "find_damage", find_damage)
    return names


@pytest.mark.parametrize(
    ("findings", "looks", "step", "left"),
    [
        ((None,), ["step-2"], 2, ["step-1", "step-2"]),
        (("a bad read", None), ["step-2"] * 2, 2, ["step-1", "step-2"]),
        (
            ("damaged", "damaged", None),
            ["step-2", "step-2", "step-1"],
            1,
            ["step-1", "step-2.bad-0"],
        ),
    ],
)
def test_a_bad_checkpoint_is_looked_at_twice_and_passed_over(
    run: RunFolder,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    findings: tuple[Finding, ...],
    looks: list[str],
    step: int,
    left: list[str],
) -> None:
    _save(make(), 1, 2)
    names = _find(monkeypatch, *findings)
    restored = make().restore()
    assert restored is not None
    assert (restored.step, names, _names(run)) == (step, looks, left)
    (event,) = _events(run, "restored")
    bad = [f"step-{2 - index}: damaged" for index in range(str(left).count("bad"))]
    assert (event["step"], event["passed_over"]) == (step, bad)
    assert 0 <= event["restore_s"] < 60
    printed = capsys.readouterr().err
    assert printed.count("PASSED OVER the checkpoint step-") == len(bad)
    assert f"going on from step {step}" in printed


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither at once nor at the next attempt, until all of them have been set aside."""
    _save(make(), 1, 2)
    with monkeypatch.context() as patch:
        _find(patch, *["damaged"] * 4)
        with pytest.raises(HpcDdpError, match=r"no good checkpoint.*step-2: damaged; step-1: dam"):
            make().restore()
    assert capsys.readouterr().err.count("PASSED OVER the checkpoint step-") == 2
    assert _names(run) == ["step-1.bad-0", "step-2.bad-0"]
    (event,) = _events(run, "restored")
    assert (event["step"], len(event["passed_over"])) == (0, 2)
    with pytest.raises(HpcDdpError, match=r"step-2\.bad-0: it was found damaged") as caught:
        make().restore()
    assert caught.value.hint
    assert caught.value.hint.endswith(f"mv {run.path} {run.path}-old")
    assert checkpoints.set_aside(run) == run.checkpoints / "aside-0"
    assert make().restore() is None
    assert sorted(os.listdir(run.checkpoints / "aside-0")) == ["step-1.bad-0", "step-2.bad-0"]


def test_a_fresh_start_that_is_refused_leaves_the_run_as_it_was(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(make(), 1, 2)
    names = _names(run)

    def start(prepared: object) -> None:
        assert (checkpoints.lost(run), _names(run)) == ([], ["aside-0"])
        raise HpcDdpError("sbatch: error: invalid partition")

    monkeypatch.setattr("hpc_ddp.submission.backends.start", start)
    prepared: Any = SimpleNamespace(run=run, spec=SimpleNamespace(array=None))
    with pytest.raises(HpcDdpError, match="invalid partition"):
        jobs._begin(prepared, fresh=True)
    assert _names(run) == names == ["step-1", "step-2"]
    shutil.rmtree(run.checkpoints / "step-1")
    shutil.rmtree(run.checkpoints / "step-2")
    assert checkpoints.lost(run) == ["step-2: it was saved, and is gone"]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(run: RunFolder, make: Make) -> None:
    """As after the purge of a scratch."""
    _save(make(), 7)
    shutil.rmtree(run.checkpoints / "step-7")
    with pytest.raises(HpcDdpError, match="step-7: it was saved, and is gone"):
        make().restore()
    assert checkpoints.set_aside(run) is None
    run.claim_attempt({}, lambda info: False)
    assert make().restore() is None


def test_a_folder_that_can_only_be_read_is_passed_over(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(make(), 1, 2)
    _find(monkeypatch, "damaged", "damaged", None)

    def refuse(folder: Path, kind: str, attempt: int) -> Path:
        raise OSError("Read-only file system")

    monkeypatch.setattr(disk, "set_aside", refuse)
    assert make().restore() is not None
    assert "damaged; kept as step-2: Read-only file system" in capsys.readouterr().err


def test_a_checkpoint_of_a_step_is_loaded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = make()
    _save(saver, 1, 2)
    assert saver.load(1).shared == {"tree": {"a": 1}}
    with pytest.raises(HpcDdpError, match=r"step-7: it is not there") as caught:
        saver.load(7)
    assert "hpc-ddp verify" in str(caught.value.hint)


def test_another_format_is_refused(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "FORMAT", 99)
        _save(make(), 1)
    with pytest.raises(HpcDdpError, match="has format 99; this hpc-ddp reads format 2"):
        open_checkpoint(run.checkpoints / "step-1")


# --- space ---------------------------------------------------------------------------------


def test_space_and_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    space.f_files = 0  # a file system that has no such count
    disk.check_space(tmp_path, 1, 4)
    space.f_blocks = space.f_bavail = 0  # or no sizes, as ramfs
    disk.check_space(tmp_path, 1, 4)


# --- what a run tracks ---------------------------------------------------------------------


def _keeper(
    saver: Checkpoints, position: Position | None = None, seed: int = 1
) -> CheckpointManager:
    return CheckpointManager(
        saver, position or Position(), [CPU], seed, ParallelDims(), only_finite=True
    )


class Count:
    """State that counts how often it is loaded."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.value = saved["value"]


def test_a_run_goes_on_with_its_objects(run: RunFolder, make: Make) -> None:
    position, count = Position(step=4, epoch=2, samples=7), Count()
    keeper = _keeper(make(), position)
    assert not keeper.tracked
    keeper.track({"count": count}, {"shuffle": True})
    assert keeper.tracked
    count.value = 9
    assert keeper.judge(0.5, higher=True)
    keeper.save_surely()
    keeper.save_surely()  # this position is saved already
    assert len(_events(run, "checkpoint")) == 1
    assert _events(run, "checkpoint")[0]["stall_s"] < 60
    manifest = checkpoints.read_manifest(run.checkpoints / "step-4")
    best = {"value": 0.5, "step": 4, "stale": 0}
    assert (manifest["epoch"], manifest["samples"], manifest["best"]) == (2, 7, best)
    there, fresh = Position(), Count()
    again = _keeper(make(), there)
    again.track({"count": fresh}, {"shuffle": True})
    assert (fresh.value, there, vars(again.best)) == (9, position, best)
    again.save_surely()
    assert len(_events(run, "checkpoint")) == 1  # it is the one that was restored
    with pytest.raises(HpcDdpError, match="called twice"):
        again.track({"count": fresh}, {})


@pytest.mark.parametrize(
    ("seed", "data", "words"),
    [
        (2, {"shuffle": True}, "seed is 2, but 1"),
        (1, {"shuffle": False}, "shuffle is False, but True"),
    ],
)
def test_another_order_of_the_samples_is_refused(
    make: Make, seed: int, data: dict[str, Any], words: str
) -> None:
    keeper = _keeper(make())
    keeper.track({"count": Count()}, {"shuffle": True})
    keeper.save_surely()
    with pytest.raises(HpcDdpError, match=words):
        _keeper(make(), seed=seed).track({"count": Count()}, data)


@pytest.mark.parametrize(
    ("higher", "values", "best", "stale"),
    [
        (True, (1.0, 3.0, 3.0, 2.0), [True, True, False, False], 2),
        (False, (3.0, 1.0, 1.0), [True, True, False], 1),
        (True, (float("nan"), 1.0, float("nan")), [False, True, False], 1),
    ],
)
def test_values_are_compared(
    make: Make, higher: bool, values: tuple[float, ...], best: list[bool], stale: int
) -> None:
    keeper = _keeper(make())
    assert [keeper.judge(value, higher) for value in values] == best
    assert keeper.best.stale == stale


def test_a_best_that_was_not_saved_is_the_next_one(run: RunFolder, make: Make) -> None:
    saver, position = make(), Position(step=1)
    keeper = _keeper(saver, position)
    keeper.track({"count": Count()}, {})
    keeper.judge(1.0, higher=True)
    _break(saver, OSError("away"))
    keeper.save()
    assert not keeper.settle()
    assert keeper.best.step is None
    _break(saver, None)
    position.step = 2
    keeper.save_surely()
    assert _names(run) == ["step-2"]
    assert vars(keeper.best)["step"] == 2
    position.step = 3
    _break(saver, OSError("away"))
    keeper.save()
    assert not keeper.settle()
    assert vars(keeper.best)["step"] == 2  # that one is there


def test_a_save_that_fails_is_tried_again(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    saver = make()
    keeper = _keeper(saver, Position(step=1))
    keeper.track({"count": Count()}, {})
    _break(saver, OSError("away"))

    def wait(seconds: float) -> None:
        slept.append(seconds)
        _break(saver, None)

    monkeypatch.setattr(manager_module.time, "sleep", wait)  # type: ignore[attr-defined]
    keeper.save_surely()
    assert (slept, _names(run)) == ([1.0], ["step-1"])


def test_the_best_weights_come_back(make: Make) -> None:
    model, position = torch.nn.Linear(2, 2), Position(step=1)
    keeper = _keeper(make(), position)
    keeper.track({"model": model}, {})
    with pytest.raises(HpcDdpError, match="the run has no best checkpoint"):
        keeper.load_best(model)
    with pytest.raises(HpcDdpError, match="the model is none"):
        keeper.load_best(torch.nn.Linear(2, 2))
    before = model.weight.detach().clone()
    keeper.judge(1.0, higher=True)
    keeper.save_surely()
    position.step = 2
    with torch.no_grad():
        model.weight.zero_()
    assert keeper.load_best(model) == 1
    assert torch.equal(model.weight, before)


def test_random_numbers_go_on(make: Make) -> None:
    with rng.untouched():
        keeper = _keeper(make(), Position(step=1))
        keeper.track({"count": Count()}, {})
        keeper.start_random()
        first = torch.rand(()).item()
        keeper.start_random()
        assert torch.rand(()).item() == first  # the seed is of the step
        keeper.save_surely()
        expected = torch.rand(()).item()
        again = _keeper(make())
        again.track({"count": Count()}, {})
        torch.rand(9)
        again.start_random()
        assert torch.rand(()).item() == expected
        again._position.step = 2
        again.save_surely()
        expected = torch.rand(()).item()
        third = _keeper(make())
        third.track({"count": Count()}, {})
        third.start_random()
        assert torch.rand(()).item() == expected


# --- what is easily overlooked -------------------------------------------------------------


def test_a_save_that_nobody_waits_for_is_no_longer_stall(run: RunFolder, make: Make) -> None:
    saver = make()
    _save(saver, 3, buffer=_buffer(copy_s=0.5))  # a device was busy for half a second
    saver._outcome = Outcome(10)
    saver._awaited_since = None
    saver._report(_content(3), 1.0)
    event = _events(run, "checkpoint")[-1]
    assert event["stall_s"] == saver.stall_s == 0.75


def test_pickled_code_is_not_run(run: RunFolder, make: Make) -> None:
    _save(make(), 1)
    torch.save({"tree": Count()}, run.checkpoints / "step-1" / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        open_checkpoint(run.checkpoints / "step-1")


def test_tensors_without_numbers_come_back(make: Make) -> None:
    saved, other = Count(), Count()
    saved.value, other.value = torch.empty(0, 3), torch.empty(5)  # type: ignore[assignment]
    keeper = _keeper(make(), Position(step=1))
    keeper.track({"x": saved}, {})
    keeper.save_surely()
    _keeper(make()).track({"x": other}, {})
    assert other.value.shape == (0, 3)  # type: ignore[attr-defined]


class Begun:
    """Takes what a rank would save."""

    def __init__(self) -> None:
        self.content: Content | None = None
        self.good = True
        self.saves, self.in_flight = 0, False
        self.control = Alone()

    def restore(self) -> None:
        return None

    def settle(self) -> bool:
        self.saves += self.good and self.in_flight
        self.in_flight = False
        return self.good

    def begin(self, content: Content) -> None:
        self.content, self.in_flight = content, True


@pytest.mark.parametrize(
    ("rank", "tells"), [(0, False), (1, False), (2, True), (3, False), (4, True)]
)
def test_the_first_rank_of_each_later_stage_tells_of_its_objects(rank: int, tells: bool) -> None:
    """Rank 0 saves what the ranks of its own stage share."""
    begun: Any = Begun()
    keeper = CheckpointManager(
        begun, Position(), [CPU], 1, ParallelDims(rank, 6, pp=3), only_finite=True
    )
    keeper.track({"count": Count()}, {})
    keeper.save()
    assert ("tree" in begun.content.rank_values) is tells
    inventory = begun.content.inventory()
    assert (inventory.stage, inventory.objects) == (rank // 2, ["count"])


@pytest.mark.parametrize(("ranks", "names"), [(1, set()), (2, {"model.weight", "model.bias"})])
def test_weights_are_compared_ever_more_seldom_and_at_the_last_save(
    ranks: int, names: set[str]
) -> None:
    begun: Any = Begun()
    position = Position()
    keeper = CheckpointManager(begun, position, [CPU], 1, ParallelDims(0, ranks), only_finite=True)
    keeper.track({"model": torch.nn.Linear(2, 2)}, {})
    compared = []
    for good in (False, True, True, True, True, True):  # one that failed does not count
        keeper.save()
        compared.append(begun.content.inventory().checksums.keys())
        begun.good = good
        position.step += 1
        assert keeper.settle() is good
        assert keeper.settle() is good
    assert compared == [names, names, names, set(), names, set()]
    keeper.save_surely()
    assert begun.content.inventory().checksums.keys() == names


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_s_optimizer_state_of_its_expert_is_kept(rank: int) -> None:
    """Rank 0 may have none: no token went to its expert."""
    begun: Any = Begun()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
    optimizer = torch.optim.Adam(model.parameters())
    model[: rank + 1](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    keeper = CheckpointManager(begun, Position(), [CPU], 1, ParallelDims(rank, 2), only_finite=True)
    keeper.track({"model": model, "optimizer": optimizer}, {})
    keeper.save()
    shared, own = begun.content.shared["tree"]["optimizer"]["state"], begun.content.rank_values
    assert shared.keys() == {"model.0.weight", "model.0.bias"}
    ranks = {rank: own, 1 - rank: {**own, "rank": 1 - rank}}
    tree = keeper._tree_of(Restored(1, begun.content.shared, ranks, Reader([])))
    assert len(tree["optimizer"]["state"]) == 2 + 2 * rank


@pytest.mark.parametrize("only_finite", [True, False])
def test_weights_that_are_not_finite_are_saved_only_where_that_is_asked_for(
    run: RunFolder, make: Make, only_finite: bool
) -> None:
    model = torch.nn.Linear(2, 2)
    keeper = CheckpointManager(make(), Position(step=1), [CPU], 1, ParallelDims(), only_finite)
    keeper.track({"model": model}, {})
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    keeper.save()
    if only_finite:
        with pytest.raises(HpcDdpError, match="NaN"):
            keeper.settle()
    else:
        assert keeper.settle()
    assert _names(run) == ([] if only_finite else ["step-1"])


def test_what_can_not_be_saved_is_said_before_the_training(make: Make) -> None:
    count = Count()
    count.value = object()  # type: ignore[assignment]
    with pytest.raises(HpcDdpError, match=r"count\.value is a builtins\.object"):
        _keeper(make()).track({"count": count}, {})


@pytest.mark.parametrize("per_rank", [(), ("model",)])
def test_tensors_that_are_each_rank_s_own_are_not_left_out_of_an_export(
    run: RunFolder, make: Make, per_rank: tuple[str, ...]
) -> None:
    keeper, model = _keeper(make(), Position(step=1)), torch.nn.Linear(2, 2)
    if not per_rank:
        ddp: Any = torch.nn.parallel.DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    keeper.track({"model": model}, {}, per_rank)
    keeper.save_surely()
    with pytest.raises(HpcDdpError, match=r"each rank had its own model\.bias"):
        export(run.path, run.path / "model.safetensors")


def test_without_stages_a_model_is_all_of_what_was_saved(make: Make) -> None:
    keeper, model = _keeper(make(), Position(step=1)), torch.nn.Linear(2, 2)
    keeper.track({"model": model}, {})
    keeper.judge(1.0, higher=True)
    keeper.save_surely()
    model.register_parameter("bias", None)
    with pytest.raises(HpcDdpError, match="bias is not in the model"):
        keeper.load_best(model)
    with pytest.raises(HpcDdpError, match="bias is not in the model"):
        _keeper(make()).track({"model": torch.nn.Linear(2, 2, bias=False)}, {})


def test_what_the_training_waits_for_at_a_save_is_its_stall(
    run: RunFolder, make: Make, clock: Clock
) -> None:
    saver = make()

    def linger(step: int) -> None:
        limit = time.monotonic() + LIMIT_S
        while saver._awaited_since is None and time.monotonic() < limit:
            os.sched_yield()
        clock.now += 5.0

    saver.before_publishing = linger
    assert _save(saver, 1) == [True]
    (event,) = _events(run, "checkpoint")
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

    monkeypatch.setattr(schedule, "prune", prune)
    saver = make()
    saver.before_publishing = publish
    for step in (1, 2):
        saver.begin(_content(step))
        assert saver._thread is not None
        assert saver._thread.daemon  # it does not hold up the end of a process that has failed
        assert saver.settle()
    saver.tidy()
    assert steps == ["saved 1", "removed after 1", "saved 2", "removed after 2"]


@pytest.mark.parametrize(("rank", "removed"), [(0, [1]), (1, [])])
def test_rank_0_alone_removes_old_checkpoints(
    make: Make, monkeypatch: pytest.MonkeyPatch, rank: int, removed: list[int]
) -> None:
    class Ranked(Alone):
        """A rank among two, to which rank 0 says that the save is good."""

        world_size = 2

        def from_first(self, value: Any) -> Any:
            return answers.pop(0) if rank else value

        def to_first(self, value: Any) -> list[Any]:
            return [] if rank else [value, value]

    Ranked.rank = rank
    answers = [None, True, Outcome(1)]
    steps: list[int] = []
    monkeypatch.setattr(schedule, "prune", lambda folder, keep, pinned: steps.append(pinned[0]))
    saver = make(background=Ranked())
    saver.begin(_content(1))
    saver.settle()
    saver.tidy()
    assert steps == removed


def test_a_disk_that_is_away_is_waited_for(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(make(), 1, 2)
    clock = stop_clock(monkeypatch, file_io)
    error = OSError(errno.EIO, "tensors-0.bin can't be read: Input/output error")
    names = _find(monkeypatch, error, error, None)
    restored = make().restore()
    assert restored is not None
    assert (restored.step, names, clock.slept) == (2, ["step-2"] * 3, [1, 1])


def test_a_disk_that_stays_away_fails_the_attempt_and_costs_nothing(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint is taken for damaged: the older one might come next, and then step 0."""
    _save(make(), 1, 2)
    clock = stop_clock(monkeypatch, file_io)
    names = _find(monkeypatch, *[OSError(errno.EIO, "Input/output error")] * 99)
    with pytest.raises(HpcDdpError, match=r"step-2 can't be read on rank 0.*: Input/output error"):
        make().restore()
    assert sum(clock.slept) >= file_io.PATIENCE_S
    assert set(names) == {"step-2"}
    assert _names(run) == ["step-1", "step-2"]


def test_what_may_not_be_read_is_a_matter_of_permissions(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(make(), 1)
    stop_clock(monkeypatch, file_io)
    _find(monkeypatch, *[OSError(errno.EACCES, "Permission denied")] * 99)
    with pytest.raises(HpcDdpError, match="Permission denied") as caught:
        make().restore()
    assert "with permission to read all of it: ls -l" in str(caught.value.hint)


def test_stray_names_do_not_keep_a_run_from_starting(run: RunFolder, make: Make) -> None:
    _save(make(), 1)
    (run.checkpoints / "step-8").symlink_to("nowhere")
    (run.checkpoints / "step-9").touch()
    restored = make().restore()
    assert restored is not None
    assert restored.step == 1
    assert _names(run) == ["step-1", "step-8.bad-0", "step-9.bad-0"]


def test_what_a_peer_can_not_read_fails_all_ranks(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make()
    _save(saver, 1)
    peers: Any = saver.control
    peers.peers = [HpcDdpError("step-1 can't be read on rank 1")]
    _find(monkeypatch, "damaged")
    with pytest.raises(HpcDdpError, match="can't be read on rank 1"):
        saver.restore()
    assert _names(run) == ["step-1"]


def test_a_folder_of_checkpoints_that_is_away_is_no_run_without_any(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(make(), 1)
    stop_clock(monkeypatch, file_io)

    def fail(folder: Path) -> list[Path]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(checkpoints, "candidates", fail)
    with pytest.raises(HpcDdpError, match=r"can't be read on rank 0.*Stale file handle"):
        make().restore()


def test_the_folder_of_a_save_may_be_there_or_its_parent_not(run: RunFolder, make: Make) -> None:
    saver = make()
    disk.draft(run.checkpoints, 1, 0).mkdir()  # by a rank that was quicker
    assert _save(saver, 1) == [True]
    shutil.rmtree(run.checkpoints)
    assert _save(saver, 2) == [True]
    assert _names(run) == ["step-2"]


def test_what_there_is_is_saved_before_the_best_comes_back(run: RunFolder, make: Make) -> None:
    model, position = torch.nn.Linear(2, 2), Position(step=1)
    keeper = _keeper(make(), position)
    keeper.track({"model": model}, {})
    keeper.judge(1.0, higher=True)
    assert keeper.load_best(model) == 1  # not saved before
    position.step = 2
    assert keeper.load_best(model) == 1
    assert _names(run) == ["step-1", "step-2"]
