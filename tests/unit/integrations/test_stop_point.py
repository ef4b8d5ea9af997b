"""A stop point of a process alone: what it saves, journals, and refuses."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_ddp.core.checkpoints import published
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.integrations import StopPoint, stop_point
from hpc_ddp.integrations.stop_point import check_step
from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint import library_checkpoints
from hpc_ddp.training.process import member
from hpc_ddp.training.stops.signals import NOTICE
from tests.raw_events import raw_events
from unit.training.checkpoint.fakes import claim_run
from unit.training.fakes import give_gpus


class QuietNotices:
    """Notices that come when a test says so."""

    reason, source, end_time = 0, "test", None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return claim_run(tmp_path)


@pytest.fixture
def exits(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is to run at the exit of the process, which is a worker of the run."""
    calls: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(member, "Notices", lambda *paths: QuietNotices())
    monkeypatch.setattr(member, "drop_failing_prints", lambda: None)
    monkeypatch.setattr(stop_point, "skip_teardown_at_exit", lambda: None)
    monkeypatch.setattr(atexit, "register", calls.append)
    job = os.environ.get("SLURM_JOB_ID", "")
    worker = {"WORKER": f"{os.getpid()} {job}", "TRAINER": "removed at the end, if one is set"}
    paths = {"RUN": run.path, "ATTEMPT": 0, "NOTICE": run.path / "notice"}
    for name, text in {**paths, **worker}.items():
        monkeypatch.setenv(f"HPC_DDP_{name}", str(text))
    monkeypatch.delenv("RANK", raising=False)
    return calls


def make(**options: Any) -> StopPoint:
    """Make the stop point of another process."""
    StopPoint._is_taken = False
    os.environ.pop("HPC_DDP_TRAINER", None)
    return StopPoint(hang_after=None, save_every=None, **options)


def save(stop: StopPoint) -> None:
    with stop.checkpoint() as folder:
        (folder / "state").write_text("x")


def named(run: RunFolder, *names: str) -> list[dict[str, Any]]:
    return [event for event in raw_events(run.path) if event["event"] in names]


def test_position_and_facts_come_back_as_they_were(
    run: RunFolder, exits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = make(save_every_steps=2)
    assert stop.latest() is None
    stop.facts["batches"] = 0
    list_files = library_checkpoints.LibraryCheckpoints._prepare

    def change_facts_and_list(*args: Any) -> Any:
        stop.facts["batches"] = 99  # the training goes on meanwhile
        return list_files(*args)

    monkeypatch.setattr(library_checkpoints.LibraryCheckpoints, "_prepare", change_facts_and_list)
    due = []
    for step in range(1, 4):
        stop.facts["batches"] = step
        stop._own_facts["batches"] = -step
        due.append(stop.step(epoch=1, samples=8, total_steps=3, loss=0.5))
        if due[-1]:
            save(stop)
    assert due == [False, True, False]
    stop.finish()
    find = library_checkpoints.LibraryCheckpoints.find_newest_of_library

    def find_older(self: Any) -> Any:
        """Return a checkpoint from before the order of buckets was kept."""
        folder, manifest = find(self)  # type: ignore[misc]
        return folder, {key: value for key, value in manifest.items() if key != "buckets"}

    monkeypatch.setattr(
        library_checkpoints.LibraryCheckpoints, "find_newest_of_library", find_older
    )
    later = make()
    folder = later.latest()
    assert folder == run.checkpoints / "step-2"
    assert (later.position.step, later.position.epoch) == (2, 1)
    assert (later.facts, later._own_facts) == ({"batches": 2}, {"batches": -2})
    (line,) = named(run, "metrics")
    assert (line["step"], line["total_steps"], line["loss"]) == (3, 3, 0.5)


def test_the_device_is_that_of_the_scripts_group(
    run: RunFolder, exits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current one of a script that has not set it is the first, which no other rank needs."""
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    places: list[torch.device] = []
    monkeypatch.setattr(devices, "is_used", lambda device: True)
    monkeypatch.setattr(devices, "mark", places.append)
    give_gpus(monkeypatch, 4)
    stop = make()
    stop.step()
    assert places == [torch.device("cuda", 3)]


@pytest.mark.parametrize(
    ("local_rank", "index", "count", "is_waited_for"),
    [(0, 0, 4, True), (2, 0, 4, False), (2, 2, 4, True), (1, 0, 1, True), (0, 0, 0, False)],
)
def test_no_worker_waits_on_a_device_that_another_one_has(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, index: int, count: int, is_waited_for: bool
) -> None:
    """As where a script moves its model by ``.to(local_rank)`` alone."""
    give_gpus(monkeypatch, count)
    monkeypatch.setattr(devices, "is_used", lambda device: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: index)
    device = devices.current_type(local_rank)
    assert (device is not None) is is_waited_for


def test_a_worker_without_a_device_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside JAX, which has nearly all of the GPU's memory; the question would open it."""
    give_gpus(monkeypatch, 4)
    questions: list[int] = []
    monkeypatch.setattr(devices, "is_used", lambda device: False)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: questions.append(0))
    assert devices.current_type(0) == torch.device("cuda")
    assert devices.current_type(2) is None
    assert not questions


def test_a_step_within_a_join_is_refused(run: RunFolder, exits: list[Any]) -> None:
    """As in Accelerate's join_uneven_inputs: the ranks would wait for each other at a save."""
    stop = make()
    stop.step()
    model = SimpleNamespace(_join_config=SimpleNamespace(enable=True))
    vars(stop._buckets)["_models"] = [model]
    with pytest.raises(UsageError, match=r"a step ends with a model in model\.join\(\)"):
        stop.step()


def test_a_notice_stops_once_it_is_saved(run: RunFolder, exits: list[Any]) -> None:
    stop = make()
    stop.begin()
    stop._notices.reason = NOTICE
    assert [stop.step() for _ in range(4)] == [False, True, True, True]  # until it is saved
    with pytest.raises(SystemExit) as left:
        save(stop)
    assert left.value.code == 0
    (stopped,) = named(run, "stopped")
    assert (stopped["step"], stopped["reason"]) == (4, "notice")
    assert not named(run, "finished")


def test_a_stop_whose_save_fails_saves_after_the_next_step(
    run: RunFolder, exits: list[Any]
) -> None:
    stop = make()
    stop.begin()
    stop._notices.reason = NOTICE
    assert [stop.step(), stop.step()] == [False, True]
    with stop.checkpoint():
        pass  # the library has written nothing
    assert stop.step()
    with pytest.raises(SystemExit):
        save(stop)
    assert [path.name for path in published(run.checkpoints)] == ["step-3"]


def test_the_run_is_done_when_the_script_is(run: RunFolder, exits: list[Any]) -> None:
    stop = make()
    stop.step()
    stop.finish()
    assert not named(run, "finished")
    stop.finish()
    exits[-1]()
    (finished,) = named(run, "finished")
    assert (finished["step"], finished["at_exit"]) == (1, True)  # its exit code counts, too
    with pytest.raises(UsageError, match="a second training"):
        stop.begin()


def test_a_finish_in_a_finally_ends_no_run_that_is_stopped(
    run: RunFolder, exits: list[Any]
) -> None:
    stop = make()

    def train() -> None:
        try:
            stop.step()
            stop._notices.reason = NOTICE
            while stop.step() or True:
                save(stop)
        finally:
            stop.finish()

    with pytest.raises(SystemExit):
        train()
    stop.finish()
    assert stop._journal_finished not in exits
    assert len(named(run, "stopped")) == 1


def test_a_finish_on_the_way_out_of_an_error_does_nothing(run: RunFolder, exits: list[Any]) -> None:
    """Its peers are elsewhere; but an error in whose handler the training began is no such one."""
    stop = make()

    def fail() -> None:
        try:
            raise ValueError("second")
        finally:
            stop.finish()

    try:
        raise ValueError("first")
    except ValueError:
        stop.step()
        with pytest.raises(ValueError, match="second"):
            fail()
        assert stop._journal_finished not in exits
        stop.finish()
    assert stop._journal_finished in exits


def test_the_end_of_a_superseded_attempt_is_not_journaled(run: RunFolder, exits: list[Any]) -> None:
    stop = make()
    stop.step()
    stop.finish()
    run.claim_attempt({}, lambda identity: False)
    exits[-1]()
    assert not named(run, "finished")


def test_what_is_refused(run: RunFolder, exits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stop = make(save_every_steps=1, format="dcp")
    assert stop.step()
    save(stop)
    with pytest.raises(UsageError, match="a str that is no number"):
        stop.step(loss="low")
    stop.finish()
    with pytest.raises(UsageError, match=r"format 'dcp'; accepted: 'lightning'"):
        make(format="lightning").latest()
    later = make(format="dcp")
    later.latest()
    check_step(later, 1, "fit()")
    with pytest.raises(UsageError, match="the training begins at step 0; accepted: 1, that of"):
        check_step(later, 0, "fit()")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2" if "SIZE" in name else "0")
    early = make()
    with pytest.raises(UsageError, match="process group is missing"):
        early.latest()
    with pytest.raises(UsageError, match="process group is missing"):  # and no second training
        early.latest()
    with pytest.raises(UsageError, match="keep_last is 1"):
        make(keep_last=1)


def test_a_second_training_of_a_process_is_refused(exits: list[Any]) -> None:
    """It would take the first one's checkpoints for its own."""
    make().latest()
    with pytest.raises(UsageError, match="a second training has begun in this process"):
        StopPoint().latest()


def save_one_step() -> None:
    """Train and save the first step, and finish."""
    stop = make(save_every_steps=1)
    stop.latest()
    assert stop.step()
    save(stop)
    stop.finish()


def test_a_checkpoint_that_the_script_has_not_loaded_is_refused(exits: list[Any]) -> None:
    save_one_step()
    other = make()
    for _ in range(2):  # also where the script catches the error
        with pytest.raises(UsageError, match="has a checkpoint, step-1, which the script has not"):
            other.step()
    assert other.latest() is not None
    other.step()


@pytest.mark.parametrize(
    ("format", "is_damaged", "reason"),
    [
        ("library", True, "has no good checkpoint any more"),
        ("lightning", False, r"format 'library'; accepted: 'lightning'"),
    ],
)
def test_no_training_begins_at_step_0_after_an_error_that_the_script_catches(
    run: RunFolder, exits: list[Any], format: str, is_damaged: bool, reason: str
) -> None:
    """Its saves would take the place of the checkpoints that it was refused for."""
    save_one_step()
    (folder,) = published(run.checkpoints)
    if is_damaged:
        (folder / "state").write_text("y")
    other = make(format=format)
    for call in (other.latest, other.latest, other.step, other.finish):
        with pytest.raises(HpcDdpError, match=reason):
            call()
    assert not other.position.step
    assert len(named(run, "training")) == 1


def test_a_checkpoint_that_can_be_read_again_is_taken_up(
    run: RunFolder, exits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that did not answer may answer the next call."""
    save_one_step()
    other = make()
    with monkeypatch.context() as patch:
        patch.setattr(library_checkpoints.LibraryCheckpoints, "find_newest", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            other.latest()
    assert other.latest() == run.checkpoints / "step-1"
    assert other.position.step == 1
