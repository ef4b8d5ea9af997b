"""Notices, deadlines and the process group in their details; clocks and peers are stand-ins."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.training.checkpoint import schedule
from hpc_ddp.training.checkpoint.schedule import (
    SaveSchedule,
    between_failures,
    young_daly,
)
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.devices import choose_backend, choose_devices
from hpc_ddp.training.models import dtensor
from hpc_ddp.training.process import process_group
from hpc_ddp.training.process.environment import DistEnv
from hpc_ddp.training.process.failure import FailureHook
from hpc_ddp.training.process.process_group import Control, leave
from hpc_ddp.training.stops import consensus, signals
from hpc_ddp.training.stops.consensus import (
    Decision,
    StopConsensus,
)
from hpc_ddp.training.stops.signals import CANCELLED, DEADLINE, NONE, NOTICE, Notices
from hpc_ddp.training.telemetry.step_timing import StepTimer
from tests.raw_events import typed
from tests.waiting import wait_until
from unit.fakes import Clock, stop_clock
from unit.training.fakes import Alone, Saves, give_gpus


class LeftError(Exception):
    """The process would have ended here, with a code."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, signals, consensus, schedule)


# --- notices -------------------------------------------------------------------------------


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said to the user; the end of the process is an error."""

    def leave(code: int) -> None:
        raise LeftError(code)

    lines: list[str] = []
    monkeypatch.setattr(signals, "say", lines.append)
    monkeypatch.setattr(os, "_exit", leave)
    return lines


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_signal_without_a_supervisor_is_a_notice(
    clock: Clock, printed: list[str], number: signal.Signals
) -> None:
    notices = Notices(None)
    notices._signalled(number)
    assert (notices.reason, notices.source) == (NOTICE, number.name)
    more = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
    assert printed == [f"{number.name}: stops and saves after this step{more}"]


def test_a_second_ctrl_c_ends_it_but_no_copy_of_the_first(clock: Clock, printed: list[str]) -> None:
    notices = Notices(None)
    notices._signalled(signal.SIGINT)
    clock.now += 1.0
    notices._signalled(signal.SIGINT)  # torchrun's copy
    clock.now += 0.1
    notices._signalled(signal.SIGTERM)
    with pytest.raises(LeftError, match="130"):
        notices._signalled(signal.SIGINT)
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("number", "word_after_s", "reason", "code"),
    [
        (signal.SIGTERM, 1.0, NOTICE, None),
        (signal.SIGTERM, 99.0, NONE, "143"),
        (signal.SIGUSR1, 99.0, NONE, None),
        (signal.SIGUSR2, 1.0, NOTICE, None),
    ],
)
def test_under_a_supervisor_its_word_counts(
    tmp_path: Path,
    clock: Clock,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    word_after_s: float,
    reason: int,
    code: str | None,
) -> None:
    path, begin = tmp_path / "notice", clock.now
    monkeypatch.setattr(
        signals, "read_word", lambda file: "time limit" if clock.now - begin > word_after_s else ""
    )
    notices = Notices(path)
    if code:
        with pytest.raises(LeftError, match=code):
            notices._signalled(number)
        assert printed == ["SIGTERM without a notice: a peer has failed; ending"]
    else:
        notices._signalled(number)
    assert notices.reason == reason
    assert clock.now - begin == pytest.approx(min(word_after_s, 2.0), abs=0.1)


def test_what_comes_after_the_end_is_nothing(clock: Clock, printed: list[str]) -> None:
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    try:
        for supervised, then_exit, term in (
            (None, False, signal.SIG_DFL),
            (None, True, signal.SIG_IGN),
            (Path("/no"), False, signal.SIG_IGN),
        ):
            notices = Notices(supervised)
            notices.end(then_exit)
            assert signal.getsignal(signal.SIGTERM) == term
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
            assert (signal.getsignal(signal.SIGINT) == signal.SIG_IGN) is (term == signal.SIG_IGN)
            assert notices._ended
        notices._signalled(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert printed == []


def test_a_lesser_reason_does_not_replace_a_greater_one(tmp_path: Path) -> None:
    notices = Notices(None)
    notices._note(DEADLINE, "a")
    notices._note(CANCELLED, "b")
    notices._note(DEADLINE, "c")
    assert (notices.reason, notices.source) == (DEADLINE, "a")
    notices.watch_for_cancel(tmp_path)
    notices._look()
    assert notices.reason == DEADLINE
    texts = ("[1]", "{}", '{"source": 5}', "x" * 200)
    assert [signals._source(text) for text in texts] == ["[1]", "notice", "5", "x" * 100]
    assert (signals.REASONS[CANCELLED], signals.REASONS[NOTICE]) == ("cancelled", "notice")


def test_a_forked_child_is_as_deadly_as_any_process() -> None:
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    woken_by = signal.set_wakeup_fd(writer.fileno())
    try:
        signal.signal(signal.SIGUSR1, signals._flag)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signals._give_back()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(woken_by)
        reader.close()
        writer.close()
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGUSR2, before[1])


# --- the pace ------------------------------------------------------------------------------


class Effort:
    """What a rank measures of itself: each call is noted."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.wanted = True

    def is_due(self) -> bool:
        return self.wanted

    def report(self) -> None:
        self.calls.append("report")

    def gather(self) -> None:
        self.calls.append("gather")


def _schedule(saves: Saves | None = None, rank: int = 0, **options: Any) -> SaveSchedule:
    checkpoints: Any = saves or Saves()
    return SaveSchedule(checkpoints, rank, **options)


def _pace(saves: Saves | None = None, effort: Any = None, **options: Any) -> StopConsensus:
    alone: Any = Alone()
    return StopConsensus(alone, Notices(None), _schedule(saves, **options), effort)


def _play_steps(pace: StopConsensus, clock: Clock, seconds: Sequence[float]) -> None:
    for step, duration in enumerate(seconds, start=1):
        clock.now += duration
        pace.step_done(step)


def _reason_with(pace: StopConsensus, clock: Clock, left_s: float) -> int:
    pace._notices.end_time = clock.now + left_s
    return pace._reason()


def test_the_deadline_is_counted_from_steps_and_saves(clock: Clock) -> None:
    """A margin, one and a half saves, and the steps of two exchanges and one more."""
    saves = Saves()
    saves.slowest_save_s = 4.0
    pace = _pace(saves)
    pace._started_at = clock.now - 1000
    pace._period = 1
    _play_steps(pace, clock, [2.0, 2.0, 2.0])
    pace._period = 1
    need_s = 5.0 + 6.0 + 3 * 2.0
    assert _reason_with(pace, clock, need_s + 0.1) == NONE
    assert _reason_with(pace, clock, need_s) == DEADLINE
    pace._notices.reason = CANCELLED
    assert _reason_with(pace, clock, 0.0) == CANCELLED


@pytest.mark.parametrize(
    ("limit_s", "steps"),
    [
        (480.0, [0.02] * 600 + [12.0] + [0.02] * 50),  # an evaluation inside an epoch
        (3600.0, [0.005] * 500 + [60.0] + [0.005] * 50),
        (6000.0, [0.002] * 1000 + [30.0, 0.002]),  # a disk that stalls
        (600.0, [180.0, 0.1, 0.1]),  # torch.compile, in the first step
        (600.0, [0.1] * 50 + [180.0, 0.1, 0.1]),  # and again for another shape
    ],
)
def test_a_pause_is_expected_once(clock: Clock, limit_s: float, steps: list[float]) -> None:
    """A run does not stop for its deadline with more than a tenth of its time left."""
    pace = _pace()
    pace._notices.end_time = clock.now + limit_s
    for step, duration in enumerate(steps, start=1):
        clock.now += duration
        assert pace.step_done(step).reason == NONE, step
    quick_s = steps[-1]
    while pace.step_done(0).reason == NONE:
        clock.now += quick_s
    assert 5.0 < pace._notices.end_time - clock.now < limit_s / 10


def test_steps_that_became_slow_are_all_expected_to_be(clock: Clock) -> None:
    pace = _pace()
    _play_steps(pace, clock, [0.1] * 20 + [10.0] * 4)
    pace._period = 1
    assert _reason_with(pace, clock, 5.0 + 7.5 + 30.0) == DEADLINE
    assert _reason_with(pace, clock, 5.0 + 7.5 + 30.1) == NONE


def test_a_save_that_met_a_disk_in_trouble_does_not_end_each_attempt(clock: Clock) -> None:
    """One of 45 s, in an earlier attempt of a job of a minute, ended all later ones at once."""
    pace = _pace(slowest_save_s=45.0)
    _play_steps(pace, clock, [0.5, 0.5, 0.5])
    assert _reason_with(pace, clock, 58.5) == NONE
    clock.now += 25.0
    assert _reason_with(pace, clock, 33.5) == NONE


def test_an_evaluation_may_come_once_more_at_the_end(clock: Clock) -> None:
    pace = _pace()
    pace._started_at = clock.now - 10_000
    _play_steps(pace, clock, [0.0, 0.0])
    clock.now += 40.0
    pace.end_pause()
    pace._period = 1
    assert _reason_with(pace, clock, 5.0 + 7.5 + 40.0) == DEADLINE
    assert _reason_with(pace, clock, 5.0 + 7.5 + 40.1) == NONE


def test_what_is_no_part_of_a_step_is_not_counted(clock: Clock) -> None:
    planner = _pace()
    clock.now += 50.0
    planner.restart_step()
    clock.now += 3.0
    planner.step_done(1)
    control: Any = planner._control
    assert control.sent == [NONE, 0, 0, 3_000_000]
    assert planner.exchanges == 1


def test_figures_are_gathered_where_all_have_heard_of_it(clock: Clock) -> None:
    effort = Effort()
    planner = _pace(effort=effort)
    planner._exchange()
    assert effort.calls == ["report"]
    effort.wanted = False
    planner._exchange()
    assert effort.calls == ["report", "report", "gather"]
    planner._exchange()
    assert effort.calls[3:] == ["report"]


class Gathering:
    """A control group of two ranks: what is gathered is there after the wait."""

    rank, world_size = 0, 2

    def start_gather(self, values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        self.sent, self._rows = values, [torch.zeros_like(values) for _ in range(2)]
        return self._rows, self

    def wait(self) -> None:
        for row in self._rows:
            row.copy_(self.sent)


def test_what_ranks_measured_is_read_when_it_is_there() -> None:
    written: list[dict[str, Any]] = []
    journal: Any = SimpleNamespace(write_later=lambda event: written.append(event.to_fields()))
    group: Any = Gathering()
    timer = StepTimer(group, journal, Position(step=4), torch.device("cpu"), ["a", "b"])
    timer.start_step()
    timer.end_step()
    timer.gather()
    timer.report()
    assert [(fields["step"], fields["steps"], fields["node"]) for fields in written] == [
        (4, 1, "a")
    ]


def test_an_exchange_takes_two_turns(clock: Clock) -> None:
    planner = _pace(every=5.0)
    clock.now += 5.0
    planner._notices.reason = NOTICE
    assert planner._exchange() == Decision()
    control: Any = planner._control
    assert control.sent == [NOTICE, 1, 0, 0]
    assert planner._read() == Decision(NOTICE, save=True)
    assert planner._period == 2
    assert planner._read() == Decision()  # it has been read
    exchanges = []
    for step in range(4):
        planner.step_done(step)
        exchanges.append(planner.exchanges)
    assert exchanges == [1, 2, 2, 3]


def test_a_save_that_was_just_decided_is_not_due_again(clock: Clock) -> None:
    planner = _pace(every=5.0)
    clock.now += 5.0
    planner._exchange()
    assert planner._exchange().save
    control: Any = planner._control
    assert control.sent[1] == 0
    decided = _pace(every_steps=2)
    decided._notices.reason = NOTICE
    decided.step_done(1)
    assert decided.step_done(2) == Decision(NOTICE, save=True)


# --- the clock of the saves ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "failed", "due_at"),
    [
        (100.0, False, 100),
        (100.0, True, 30),
        (10.0, True, 10),
        (None, False, None),
        (None, True, 30),
    ],
)
def test_when_a_save_is_due(
    clock: Clock, every: float | None, failed: bool, due_at: int | None
) -> None:
    saves = Saves()
    saves.failed = failed
    planner, other = _schedule(saves, every=every), _schedule(saves, rank=1, every=every)
    result = []
    for _ in range(200):
        result.append(planner.is_due())
        assert not other.is_due()
        clock.now += 1
    assert (result.index(True) if True in result else None) == due_at
    planner.saved()
    assert not planner.is_due()


def test_the_interval_is_within_bounds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert young_daly(2.0, 100.0) == 20.0
    for stall_s, slowest_s, every in ((0.0, 5.0, 20.0), (1e9, 5.0, 3600.0)):
        saves = Saves()
        planner = _schedule(saves, every="auto")
        assert planner._every == 30.0
        planner.saved()  # nothing has been measured
        assert capsys.readouterr().err == ""
        saves.stall_s, saves.slowest_save_s = stall_s, slowest_s
        planner.saved()
        assert planner._every == every
        assert "hpc-ddp: saving every" in capsys.readouterr().err
    other = _schedule(saves, rank=1, every="auto")
    other.saved()
    assert capsys.readouterr().err == ""
    assert planner.save_s() == 5.0
    saves.in_flight = True
    assert planner.save_s() == 10.0


def test_an_attempt_without_steps_is_no_failure() -> None:
    assert between_failures([]) == 86_400.0
    assert between_failures([typed("started", 5.0)]) == 86_400.0


# --- devices and the process group ---------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "per_worker", "local", "torchrun", "first"),
    [
        (0, 2, 0, False, None),
        (4, 1, 3, True, 3),
        (4, 2, 1, True, 2),
        (2, 2, 1, False, 0),  # srun lets a task see its own
        (3, 2, 1, True, "start 1 workers per node"),
        (1, 1, 1, True, "2 workers on this node, but 1 visible"),
    ],
)
def test_each_worker_has_gpus_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    per_worker: int,
    local: int,
    torchrun: bool,
    first: int | str | None,
) -> None:
    current = give_gpus(monkeypatch, gpus)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    info = DistEnv(local, local, 2, 2, launched=True)
    if isinstance(first, str):
        with pytest.raises(HpcDdpError) as caught:
            choose_devices(info, per_worker)
        assert first in f"{caught.value.message} {caught.value.hint}"
        assert (" of 2 GPUs" in caught.value.message) is (per_worker == 2)
        return
    expected = [torch.device("cpu")] * per_worker
    if first is not None:
        expected = [torch.device("cuda", first + index) for index in range(per_worker)]
    assert choose_devices(info, per_worker) == expected
    assert current == ([] if first is None else [first])


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [
        ("cuda", ", or hide the GPUs with CUDA_VISIBLE_DEVICES=''"),
        ("xpu", ", or hide the GPUs with ONEAPI_DEVICE_SELECTOR='*:cpu'"),
    ],
)
def test_a_hint_names_a_variable_that_is_known_to_work(
    monkeypatch: pytest.MonkeyPatch, kind: str, hidden: str
) -> None:
    give_gpus(monkeypatch, 1, kind)
    with pytest.raises(HpcDdpError) as caught:
        choose_devices(DistEnv(0, 0, 2, 2, launched=True), 2)
    assert caught.value.hint == f"take fewer GPUs{hidden}"


@pytest.mark.parametrize(
    ("asked", "device", "backend"),
    [
        (None, "cpu", "gloo"),
        (None, "cuda", "nccl"),
        (None, "xpu", "xccl"),
        ("gloo", "cuda", "gloo"),
        ("nccl", "cpu", "there is no GPU here"),
        ("mpi", "cpu", "built without MPI"),
        ("ucc", "cpu", "built without UCC"),
    ],
)
def test_the_backend_follows_the_device(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, device: str, backend: str
) -> None:
    available = {"gloo", "nccl", "xccl"}
    monkeypatch.setattr(dist, "is_backend_available", available.__contains__)
    if " " in backend:
        with pytest.raises(HpcDdpError, match=backend):
            choose_backend(asked, torch.device(device))
    else:
        assert choose_backend(asked, torch.device(device)) == backend


@pytest.mark.parametrize(
    ("launched", "hang_after_s", "timeout_s"),
    [(True, 10.0, 1800), (True, 5000.0, 5300), (False, None, None)],
)
def test_a_process_joins_its_group(
    monkeypatch: pytest.MonkeyPatch,
    launched: bool,
    hang_after_s: float | None,
    timeout_s: float | None,
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda b, **values: calls.append((b, values)))
    monkeypatch.setattr(dist, "new_group", lambda **values: values)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(process_group, "_met_at_agents", [])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    info = DistEnv(1, 1, 2, 2, launched=launched)
    group_of_all = process_group.join(info, [torch.device("cpu")], hang_after_s)
    timeout = process_group.NEVER if timeout_s is None else timedelta(seconds=timeout_s)
    (backend, values) = calls[0]
    assert backend == "gloo"
    if launched:
        assert values == {"timeout": timeout}
    else:
        assert (values["rank"], values["world_size"]) == (0, 1)
    group: Any = {"backend": "gloo", "timeout": timeout}
    for item in (group_of_all, process_group.Control(info, group_of_all.timeout)):
        assert (item.rank, item.world_size, item._group) == (1, 2, group)
    if launched:
        with pytest.raises(UsageError, match="start\\(\\) was called again"):
            process_group.join(info, [torch.device("cpu")], hang_after_s)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(HpcDdpError, match="MPI knows of 1 processes, and 2 were started"):
        process_group.join(info, [torch.device("cpu")], hang_after_s)


@pytest.mark.parametrize("count", [1, 2])
def test_a_group_of_workers_with_several_devices_is_bound_to_none(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(dist, "init_process_group", lambda b, **values: calls.append(values))
    monkeypatch.setattr(dist, "new_group", lambda **values: values)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    gpus = [torch.device("cuda", index) for index in range(count)]
    process_group.join(DistEnv(1, 1, 2, 2, launched=True), gpus, None)
    assert calls[0].get("device_id") == (gpus[0] if count == 1 else None)


@pytest.mark.parametrize(("hangs", "then_exit"), [(False, True), (True, True), (True, False)])
def test_a_teardown_that_hangs_is_left(
    monkeypatch: pytest.MonkeyPatch,
    printed: list[str],
    capsys: pytest.CaptureFixture[str],
    hangs: bool,
    then_exit: bool,
) -> None:
    calls: list[str] = []
    release = threading.Event()

    class Group:
        def barrier(self) -> None:
            calls.append("barrier")
            release.wait(60 if hangs else 0.1)  # each takes a moment

    group: Any = Group()
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(process_group, "TEARDOWN_S", 0.01 if hangs else 60.0)
    if hangs and then_exit:
        with pytest.raises(LeftError, match="0"):
            leave(group, torch.device("cpu"), then_exit)
    else:
        leave(group, torch.device("cpu"), then_exit)
    text = capsys.readouterr().err
    assert ("the process group did not come down" in text) is hangs
    assert calls == (["barrier"] if hangs else ["barrier", "destroy"])
    release.set()
    _wait_for_teardowns()


def _wait_for_teardowns() -> None:
    for thread in threading.enumerate():
        if (
            thread is not threading.current_thread()
            and thread.daemon
            and "tear_down" in thread.name
        ):
            thread.join(60)


def test_small_talk_goes_through_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dist, "new_group", lambda **values: "group")

    def gather(values: Any, box: Any, dst: int, group: str, async_op: bool = False) -> str:
        calls.append(f"gather {dst} {group} {async_op} {box is None}")
        if box is not None:
            box[1] = values
        return "work"

    def broadcast(values: Any, src: int, group: str) -> None:
        calls.append(f"broadcast {src} {group}")
        values[0] = values[0] * 2

    monkeypatch.setattr(dist, "gather_object", gather)
    monkeypatch.setattr(dist, "gather", gather)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    first, second = (
        Control(DistEnv(rank, 0, 2, 1, launched=True), process_group.NEVER) for rank in (0, 1)
    )
    assert first.to_first("x") == [None, "x"]
    assert second.to_first("x") == []
    assert first.from_first("x") == "xx"
    result, work = first.start_gather(torch.ones(3))
    assert (len(result), work) == (2, "work")
    assert second.start_gather(torch.ones(3)) == ([], "work")
    tensor = torch.ones(3)
    first.first_copy(tensor)
    assert tensor.tolist() == [2.0, 1.0, 1.0]
    names = ["gather 0 group False False", "gather 0 group False True", "broadcast 0 group"]
    names += ["gather 0 group True False", "gather 0 group True True", "broadcast 0 group"]
    assert calls == names


def test_what_all_ranks_do_is_done_in_their_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never in torch's default one, where gradients are under way."""
    calls: list[tuple[Any, ...]] = []

    def reduce(values: Any, op: Any = "sum", group: Any = None, async_op: bool = False) -> str:
        calls.append((values.tolist(), op, group, async_op))
        return "work"

    monkeypatch.setattr(dist, "new_group", lambda **values: "own")
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "barrier", lambda group: calls.append((group,)))
    talk = Control(DistEnv(0, 0, 2, 2, launched=True), process_group.NEVER)
    assert talk.start_max(torch.tensor([1])) == "work"
    talk.sum(torch.tensor([2]))
    talk.barrier()
    assert calls == [([1], dist.ReduceOp.MAX, "own", True), ([2], "sum", "own", False), ("own",)]


def test_before_the_first_step_no_time_is_kept_for_steps(clock: Clock) -> None:
    for turns in (0, 1):
        planner = _pace()
        for _ in range(turns):
            planner._exchange()
        assert _reason_with(planner, clock, 5.0 + 1.5 * 5.0 + 0.1) == NONE


def test_what_was_printed_is_not_lost_with_a_process_that_hangs(
    monkeypatch: pytest.MonkeyPatch, printed: list[str]
) -> None:
    release = threading.Event()
    group: Any = SimpleNamespace(barrier=lambda: release.wait(60))
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(raw)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(process_group, "TEARDOWN_S", 0.01)
    print("accuracy 0.97")
    with pytest.raises(LeftError):
        leave(group, torch.device("cpu"), True)
    assert raw.getvalue() == b"accuracy 0.97\n"
    release.set()
    _wait_for_teardowns()


def test_a_rank_that_has_no_clock_of_the_saves_sends_that_none_is_due(clock: Clock) -> None:
    planner = _pace(every=1.0, rank=1)
    clock.now += 5.0
    assert planner.decide_now() == Decision()


@pytest.mark.parametrize("by_signal", [True, False])
def test_what_is_installed_hears_signals_and_looks_at_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: list[str], by_signal: bool
) -> None:
    after_fork: list[Any] = []
    monkeypatch.setattr(
        os, "register_at_fork", lambda after_in_child: after_fork.append(after_in_child)
    )
    monkeypatch.setattr(signals, "POLL_S", 0.01)
    numbers = (*signals.SIGNALS, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGALRM, lambda *_: None)  # somebody else's
    notices = Notices(None if by_signal else tmp_path / "notice")
    woken_by = signal.set_wakeup_fd(-1)
    try:
        notices.install()
        if by_signal:
            os.kill(os.getpid(), signal.SIGALRM)
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            (tmp_path / "notice").write_text("preemption")
        wait_until(lambda: notices.reason == NOTICE, "the notice")
        assert notices.source == ("SIGUSR1" if by_signal else "preemption")
        assert after_fork == [signals._give_back]
    finally:
        notices._ended = True
        for thread in threading.enumerate():
            if thread.name == "hpc-ddp notices":
                assert thread.daemon
                thread.join(60)
        signal.set_wakeup_fd(woken_by)
        for number, handler in before.items():
            signal.signal(number, handler)
        notices._reader.close()
        notices._writer.close()


class Thread:
    """A thread that is noted, not started."""

    def __init__(self, noted: list[dict[str, Any]], **values: Any) -> None:
        self.noted, self.values = noted, values

    def start(self) -> None:
        self.noted.append(self.values)


def test_a_loader_worker_outlives_what_all_processes_of_a_step_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    masks: list[Any] = []
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *mask: masks.append(mask))
    threads: list[dict[str, Any]] = []
    monkeypatch.setattr(threading, "Thread", partial(Thread, threads))
    try:
        signals.ignore_in_loader(0)
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert masks == [(signal.SIG_BLOCK, {signal.SIGTERM})]
    obeys = {"target": signals._obey, "args": (os.getppid(),), "daemon": True}
    assert threads == [obeys]


def test_a_loader_worker_obeys_its_parent_alone(
    monkeypatch: pytest.MonkeyPatch, printed: list[str]
) -> None:
    senders = [1, 5, 7, 5]
    monkeypatch.setattr(
        signal, "sigwaitinfo", lambda numbers: SimpleNamespace(si_pid=senders.pop(0))
    )
    with pytest.raises(LeftError, match="0"):
        signals._obey(7)
    assert senders == [5]


def test_a_forked_process_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread of a loader worker may end by an error once the rank has left."""
    hook = FailureHook(DistEnv(), "n1")
    hook.journal = Journal(tmp_path / "rank-0.jsonl", "rank-0")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    error = ConnectionResetError("by peer")
    hook(type(error), error, None)  # and the process goes on
    assert "ConnectionResetError: by peer" in capsys.readouterr().err
    assert not (tmp_path / "rank-0.jsonl").exists()


def test_a_group_of_two_kinds_is_stepped_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the step only: a checkpoint may be taken up where all are of one kind."""
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    monkeypatch.setattr(dtensor, "is_sharded", lambda tensor: tensor is third)
    seen: list[Any] = []

    class Spied(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append([group["foreach"] for group in self.param_groups])

    optimizer = Spied([first], lr=0.1)
    dtensor.step_apart(optimizer)
    optimizer.step()
    optimizer.add_param_group({"params": [second, third]})
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "foreach": True})
    optimizer.step()
    assert seen == [[None], [None, False], [None, False, True]]
    assert [group["foreach"] for group in optimizer.param_groups] == [None, None, True]
