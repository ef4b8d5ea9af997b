"""A step that does not end by itself is ended, so that the verdict can come."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.watch import end_step
from hpc_ddp.node.watch.end_step import ENDED_S, KEPT_S, guard_step
from unit.fakes import Clock, stop_clock
from unit.node.batch.fakes import step_environ, write_record


class StopGuardError(Exception):
    """The end of a guard_step that would look on for ever."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, end_step)


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[tuple[float, str]]:
    """The moments and reasons of kills; the guard_step ends with the first, or after an hour."""
    moments: list[tuple[float, str]] = []

    def kill(shell: int, why: str) -> None:
        assert shell == 77
        moments.append((clock.now, why))
        raise StopGuardError

    def sleep_at_most_an_hour(seconds: float) -> None:
        clock.now += seconds
        if clock.now > 3600.0 + 1000.0:
            raise StopGuardError

    monkeypatch.setattr(end_step, "_kill_step", kill)
    monkeypatch.setattr(clock, "sleep", sleep_at_most_an_hour)
    monkeypatch.setattr(slurm, "show_config", lambda: {"KillWait": "30 sec"})
    return moments


def run_guard(run: RunFolder, **environ: str) -> None:
    with pytest.raises(StopGuardError):
        guard_step(step_environ(run, **environ), 77)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have Slurm say how much of a job's time is left by its clock, or not answer (None)."""

    def set_answer(
        end: float | None, clock: Clock, preempted: bool = False, ended_at: float = math.inf
    ) -> None:
        def ask(job_id: str, **options: Any) -> Any:
            if end is None:
                return None
            state = "RUNNING" if clock.now < ended_at else "COMPLETING"
            left_s = end - min(clock.now, ended_at)
            return SimpleNamespace(left_s=left_s, state=state, preempted=preempted)

        monkeypatch.setattr(end_step, "ask_about_job", ask)

    return set_answer


def test_a_step_beyond_its_time_limit_is_killed(
    run: RunFolder,
    attempt: AttemptFolder,
    clock: Clock,
    kills: list[tuple[float, str]],
    answer: Callable[..., None],
) -> None:
    end = clock.now + 200.0
    answer(end, clock)
    run_guard(run, HPC_DDP_END_TIME=f"{end:.0f}")
    ((moment, why),) = kills
    assert 0 <= moment - (end + 30.0 - KEPT_S) < 1.5  # before Slurm ends the batch shell
    assert "time limit" in why


@pytest.mark.parametrize("late_s", [3.0, 20.0, 29.0])
def test_a_step_is_killed_where_slurm_has_begun_to_end_the_job(
    run: RunFolder,
    attempt: AttemptFolder,
    clock: Clock,
    kills: list[tuple[float, str]],
    answer: Callable[..., None],
    late_s: float,
) -> None:
    """Slurm notices a limit up to half a minute late; the job's RunTime stands still then."""
    end = clock.now + 200.0
    answer(end, clock, ended_at=end + late_s)
    run_guard(run, HPC_DDP_END_TIME=f"{end:.0f}")
    ((moment, _),) = kills
    assert 0 <= moment - (end + 30.0 - KEPT_S) < 1.5


@pytest.mark.parametrize(("end", "preempted"), [(None, False), (9e9, False), (0.0, True)])
def test_a_limit_that_is_extended_or_not_known_ends_no_step(
    run: RunFolder,
    attempt: AttemptFolder,
    clock: Clock,
    kills: list[tuple[float, str]],
    answer: Callable[..., None],
    end: float | None,
    preempted: bool,
) -> None:
    answer(end, clock, preempted)
    run_guard(run, HPC_DDP_END_TIME=f"{clock.now + 200:.0f}")
    assert kills == []


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_launcher_that_outlives_all_nodes_is_killed(
    run: RunFolder,
    attempt: AttemptFolder,
    clock: Clock,
    kills: list[tuple[float, str]],
    count: int,
) -> None:
    began = clock.now
    for node in ("n1", "n2")[:count]:
        write_record(attempt, node)
    run_guard(run, HPC_DDP_END_TIME="")
    if count < 2:
        assert kills == []
        return
    ((moment, why),) = kills
    assert ENDED_S < moment - began < ENDED_S + 3 * end_step.POLL_S
    assert "all nodes have ended" in why


def test_kill_wait_is_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    for config, seconds in (({"KillWait": "10 sec"}, 10.0), ({}, 30.0)):
        monkeypatch.setattr(slurm, "show_config", lambda config=config: config)
        assert end_step._kill_wait() == seconds

    def refuse() -> None:
        raise HpcDdpError("no answer")

    monkeypatch.setattr(slurm, "show_config", refuse)
    assert end_step._kill_wait() == 30.0


def test_only_launchers_of_the_batch_script_are_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The parent here is this process; a verdict or a user's program are children, too."""
    printed: list[str] = []
    monkeypatch.setattr(end_step, "say", printed.append)
    monkeypatch.setattr(end_step, "LAUNCHERS", ("hpcddp-srun",))
    launcher = tmp_path / "hpcddp-srun"
    launcher.symlink_to("/bin/sleep")
    driver = [sys.executable, "-c", "import time; time.sleep(60)", "preflight.driver"]
    children = [subprocess.Popen(argv) for argv in ([launcher, "60"], ["sleep", "60"], driver)]
    try:
        end_step._kill_step(os.getpid(), "it takes too long")
        assert children[0].wait(60) == children[2].wait(60) == -signal.SIGKILL
        assert children[1].poll() is None
        assert len(printed) == 2
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_the_environment_is_that_of_the_attempt(run: RunFolder, attempt: AttemptFolder) -> None:
    env = AttemptEnv.from_env(step_environ(run, HPC_DDP_END_TIME="500"))
    assert end_step._end_time(env) == 500.0
    attempt.end_time.write_text("900")
    assert end_step._end_time(env) == 900.0
    attempt.end_time.unlink()
    assert end_step._end_time(AttemptEnv.from_env(step_environ(run, HPC_DDP_END_TIME=""))) == float(
        "inf"
    )


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_guard_of_a_job_that_can_not_be_read_ends_with_a_sentence(
    run: RunFolder,
    attempt: AttemptFolder,
    content: bytes | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(end_step, "patiently", lambda read: read())
    run.job_json.unlink()
    if content:
        run.job_json.write_bytes(content)
    guard_step(step_environ(run), 77)
    assert "is not ended before the time limit: " in capfd.readouterr().err
