"""The batch shell's calls while the step runs: warnings, time limits, ports."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.journal.enums import Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import batch
from hpc_ddp.node.batch import next_port
from hpc_ddp.node.watch import end_time
from hpc_ddp.node.watch.end_time import give_warning
from unit.fakes import Clock
from unit.node.batch.fakes import step_environ


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Callable[..., list[float]]:
    """Have Slurm give a job one end after the other, each from a time on, None for no answer;
    return when it was asked."""

    def set_limits(preempted_at: float = math.inf, **ends: float | None) -> list[float]:
        asked_at: list[float] = []

        def ask(job_id: str, is_quiet: bool = False) -> Any:
            asked_at.append(clock.now)
            end = [end for since, end in ends.items() if float(since[1:]) <= clock.now][-1]
            if end is None:
                return None
            left_s = end - clock.now
            return SimpleNamespace(end_time=end, left_s=left_s, preempted=clock.now >= preempted_at)

        for module in (batch, end_time):
            monkeypatch.setattr(module, "ask_about_job", ask)
        return asked_at

    return set_limits


@pytest.mark.parametrize(
    ("is_preempted", "end_in", "warn_s", "word", "slept"),
    [
        (False, 1000.0, "60", "warning signal", 940.0),
        (False, 1000.0, "", "warning signal", 1000.0),
        (False, 1000.0, "2000", "warning signal", 0.0),
        (True, 1000.0, "60", "preemption", 0.0),
        (False, None, "60", "warning signal", 0.0),
    ],
)
def test_a_warning_is_passed_on_in_time(
    clock: Clock,
    run: RunFolder,
    attempt: AttemptFolder,
    limits: Callable[..., list[float]],
    is_preempted: bool,
    end_in: float | None,
    warn_s: str,
    word: str,
    slept: float,
) -> None:
    limits(0.0 if is_preempted else math.inf, _0=None if end_in is None else clock.now + end_in)
    give_warning(step_environ(run, HPC_DDP_WARN_S=warn_s))
    assert attempt.notice.read_text() == word
    assert sum(clock.slept) == pytest.approx(slept)


@pytest.mark.parametrize(
    ("later", "last"),
    [
        (200_000.0, 199_940),  # extended by the operator
        (50_000.0, 49_940),  # shortened
        (None, 86_340),  # the controller is down: what is known counts
        (math.inf, None),  # set to UNLIMITED
    ],
)
def test_the_end_time_is_queried_repeatedly(
    clock: Clock,
    run: RunFolder,
    attempt: AttemptFolder,
    limits: Callable[..., list[float]],
    later: float | None,
    last: float | None,
) -> None:
    clock.now = 0.0
    asked_at = limits(_0=86_400.0, _20000=later, _300000=300_050.0)
    end_time.watch_end_time(step_environ(run, HPC_DDP_WARN_S="60", HPC_DDP_END_TIME="86400"))
    if last is None:  # until there is a limit again
        assert attempt.end_time.read_text() == "300050"
        return
    assert asked_at[-1] == pytest.approx(last)  # just before the nodes are warned
    assert attempt.end_time.read_text() == (f"{later:.0f}" if later else "")
    assert len(asked_at) < 100


def test_a_later_time_limit_is_used(
    clock: Clock, run: RunFolder, attempt: AttemptFolder, limits: Callable[..., list[float]]
) -> None:
    clock.now = 0.0
    limits(_0=math.inf, _5000=9000.0)
    end_time.watch_end_time(step_environ(run, HPC_DDP_WARN_S="60", HPC_DDP_END_TIME=""))
    assert attempt.end_time.read_text() == "9000"
    assert clock.now == pytest.approx(8940.0)


def test_the_end_of_an_interrupted_run_is_not_put_off(
    clock: Clock, run: RunFolder, attempt: AttemptFolder, limits: Callable[..., list[float]]
) -> None:
    """The allocation's own end comes later."""
    clock.now = 0.0
    limits(_0=9000.0)
    attempt.notice.write_text("interrupted")
    attempt.end_time.write_text("60")
    end_time.watch_end_time(step_environ(run, HPC_DDP_WARN_S="5", HPC_DDP_END_TIME="300"))
    assert attempt.end_time.read_text() == "60"


@pytest.mark.parametrize("since", [0.0, 12.0, 100.0])
def test_a_preemption_while_the_step_starts_becomes_the_notice_soon(
    clock: Clock,
    run: RunFolder,
    attempt: AttemptFolder,
    limits: Callable[..., list[float]],
    since: float,
) -> None:
    """Slurm's signal reached no supervisor: a script trained through its whole grace time."""
    clock.now = 0.0
    asked_at = limits(_0=86_400.0, preempted_at=since)
    end_time.watch_end_time(step_environ(run, HPC_DDP_WARN_S="60", HPC_DDP_END_TIME="86400"))
    assert attempt.notice.read_text() == "preemption"
    assert asked_at[-1] <= 2 * since + 5.0


def test_a_warning_that_came_before_the_limit_was_extended_waits(
    clock: Clock, run: RunFolder, attempt: AttemptFolder, limits: Callable[..., list[float]]
) -> None:
    clock.now = 80.0
    limits(_0=150.0, _85=1150.0)
    give_warning(step_environ(run, HPC_DDP_WARN_S="60", HPC_DDP_END_TIME="150"))
    assert clock.now == pytest.approx(1090.0)
    assert attempt.end_time.read_text() == "1150"
    assert attempt.notice.read_text() == "warning signal"


@pytest.mark.parametrize(
    ("left_s", "cause", "plan"),
    [
        (1000.0, Cause.PREEMPTED, "300 preempted"),
        (320.0, Cause.TIME_LIMIT, "300 time-limit"),
        (120.0, Cause.FAILED, "100 failed"),
        (3.0, Cause.FINISHED, "1 finished"),
        (1000.0, Cause.FINISHED, "980 finished"),
        (None, Cause.FAILED, "300 failed"),
        (None, Cause.FINISHED, "3000000 finished"),
    ],
)
def test_a_teardown_leaves_time_for_the_verdict(
    clock: Clock,
    run: RunFolder,
    attempt: AttemptFolder,
    limits: Callable[..., list[float]],
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    left_s: float | None,
    cause: Cause,
    plan: str,
) -> None:
    """After a training that has finished all of it: an evaluation may take long."""
    limits(_0=clock.now + left_s if left_s else None)
    monkeypatch.setattr(batch, "preview_cause", lambda *words: cause)
    assert batch.plan_teardown(step_environ(run, HPC_DDP_END_TIME="")) == plan
    assert bool(printed) == (int(plan.split()[0]) < 300)


def test_a_second_port_starts_without_records_of_the_first(
    run: RunFolder, attempt: AttemptFolder
) -> None:
    node = attempt.node("n1")
    node.path.mkdir()
    for path in (node.record, attempt.node("n1", 1).record, attempt.port_taken):
        path.write_text("{}")
    attempt.failed.write_text("n1")
    assert next_port(step_environ(run, HPC_DDP_PORT="32767")) >= 10000
    assert (attempt.failed.read_text(), node.records()) == ("", [])
    assert not attempt.port_taken.exists()


def test_the_next_port_is_another_one(
    run: RunFolder, attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt.port_taken.touch()
    monkeypatch.setattr(batch, "free_port", lambda start: start)
    assert next_port(step_environ(run, HPC_DDP_PORT="20000")) == 20001
