"""An elastic job that has lost its first node; Slurm's commands are stand-ins."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import batch
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.watch import head_failover
from unit.fakes import Clock, Slurm, stop_clock

SHOWN = "   JobState={} Reason=None\n   Requeue=1 Restarts={} BatchFlag=1\n   NodeList=n[2-3]\n"
ENVIRON = {"SLURM_JOB_ID": "7", "HPC_DDP_RESTARTS": "1"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, head_failover)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    return RunFolder(tmp_path / "name" / "run").make().claim_attempt({}, lambda identity: False)


def _place(attempt: AttemptFolder, index: int = 1) -> Place:
    nodes = ("n1", "n2", "n3", "n4")
    run = RunFolder(attempt.path.parents[1])
    return Place(run, attempt, nodes, index, "", None, 0.0, None)


def _answer(
    slurm: Slurm, state: str = "RUNNING", restarts: int = 1, remaining: str = "n2 n3"
) -> None:
    shown = SHOWN.format(state, restarts)
    slurm.answer_by(
        "scontrol", f"[ $2 = hostnames ] && printf '%s\\n' {remaining} || printf '{shown}'"
    )


@pytest.mark.parametrize(
    ("state", "restarts", "remaining"),
    [
        ("RUNNING", 1, ["n2", "n3"]),
        ("RUNNING", 2, []),  # Slurm has requeued it meanwhile
        ("PENDING", 1, []),
        ("COMPLETING", 2, []),
    ],
)
def test_the_nodes_of_the_current_start_are_listed(
    slurm_commands: Slurm, state: str, restarts: int, remaining: list[str]
) -> None:
    _answer(slurm_commands, state, restarts)
    assert head_failover._nodes_left(ENVIRON) == remaining


def test_a_controller_that_refuses_names_no_node(slurm_commands: Slurm) -> None:
    slurm_commands.answer("scontrol", err="Access denied", code=1)
    assert head_failover._nodes_left(ENVIRON) == []


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments that verdicts were given in."""
    environs: list[dict[str, str]] = []
    monkeypatch.setattr(batch, "give_verdict", environs.append)
    return environs


@pytest.mark.parametrize(
    ("remaining", "index", "ends"), [("n2 n3", 1, True), ("n2 n3", 2, False), ("n3 n4", 2, True)]
)
def test_the_first_node_that_is_left_gives_the_verdict(
    slurm_commands: Slurm,
    attempt: AttemptFolder,
    clock: Clock,
    ended: list[dict[str, str]],
    remaining: str,
    index: int,
    ends: bool,
) -> None:
    _answer(slurm_commands, remaining=remaining)
    slurm_commands.answer("scancel")
    head_failover.take_over_verdict(_place(attempt, index), ENVIRON, lambda: False)
    assert ended == ([ENVIRON] if ends else [])
    assert slurm_commands.calls("scancel") == ([["7"]] if ends else [])  # no shell ends it
    assert clock.slept == []


def test_a_job_that_its_verdict_has_requeued_is_not_cancelled(
    slurm_commands: Slurm,
    attempt: AttemptFolder,
    ended: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remaining = iter([["n2"], []])
    monkeypatch.setattr(head_failover, "_nodes_left", lambda environ: next(remaining))
    head_failover.take_over_verdict(_place(attempt), ENVIRON, lambda: False)
    assert ended == [ENVIRON]
    assert slurm_commands.calls("scancel") == []


@pytest.mark.parametrize("remaining", ["n1 n2 n3", ""])
def test_slurms_list_of_nodes_is_awaited(
    slurm_commands: Slurm,
    attempt: AttemptFolder,
    clock: Clock,
    ended: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    remaining: str,
) -> None:
    _answer(slurm_commands, remaining=remaining)
    head_failover.take_over_verdict(_place(attempt), ENVIRON, lambda: clock.now >= 1100)
    assert (clock.now, ended) == (1100.0, [])
    monkeypatch.setattr(head_failover, "PATIENCE_S", 200.0)
    head_failover.take_over_verdict(_place(attempt), ENVIRON, lambda: False)
    assert (clock.now, ended) == (1300.0, [])


@pytest.mark.parametrize("why", ["no Slurm", "told", "superseded", "record"])
def test_supervisors_that_can_not_decide_do_not_wait(
    slurm_commands: Slurm,
    attempt: AttemptFolder,
    clock: Clock,
    ended: list[dict[str, str]],
    why: str,
) -> None:
    _answer(slurm_commands, remaining="n1 n2 n3")
    place = _place(attempt)
    if why == "superseded":
        place.run.claim_attempt({}, lambda identity: False)
    if why == "record":
        attempt.node("n1").path.mkdir()
        attempt.node("n1").record.touch()
    environ = {} if why == "no Slurm" else ENVIRON
    head_failover.take_over_verdict(place, environ, lambda: why == "told")
    assert (ended, clock.slept) == ([], [])


# --- while it runs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "environ", "remaining", "watches"),
    [
        (1, ENVIRON, "n2 n3", True),
        (2, ENVIRON, "n2 n3", True),
        (0, ENVIRON, "n2 n3", False),
        (3, ENVIRON, "n2 n3", False),
        (1, {}, "n2 n3", False),
    ],
)
def test_few_nodes_look_for_the_first_one(
    slurm_commands: Slurm,
    attempt: AttemptFolder,
    monkeypatch: pytest.MonkeyPatch,
    index: int,
    environ: dict[str, str],
    remaining: str,
    watches: bool,
) -> None:
    monkeypatch.setattr(head_failover, "ASK_EVERY_S", 0.0)
    _answer(slurm_commands, remaining=remaining)
    started: list[Callable[[], None]] = []

    class Thread:
        def __init__(self, target: Callable[[], None], daemon: bool) -> None:
            assert daemon
            self.target = target

        def start(self) -> None:
            started.append(self.target)

    monkeypatch.setattr(threading, "Thread", Thread)
    lost = head_failover.watch_head(_place(attempt, index), environ)
    assert bool(started) is watches
    assert not lost.is_set()
    for look in started:
        look()
        assert lost.is_set()


def test_a_first_node_that_is_there_is_looked_for_again(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([["n1", "n2"], [], ["n1"], ["n2"]])
    monkeypatch.setattr(head_failover, "ASK_EVERY_S", 0.0)
    monkeypatch.setattr(head_failover, "_nodes_left", lambda environ: next(answers))
    assert head_failover.watch_head(_place(attempt), dict(os.environ, **ENVIRON)).wait(60)
    assert next(answers, None) is None


def test_a_verdict_that_fails_leaves_no_job_without_a_shell(
    slurm_commands: Slurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(environ: dict[str, str]) -> int:
        raise HpcDdpError("the run's job.json is broken")

    monkeypatch.setattr(batch, "give_verdict", refuse)
    monkeypatch.setattr(head_failover, "_nodes_left", lambda environ: ["n2"])
    slurm_commands.answer("scancel", err="Access denied", code=1)
    head_failover._end_job({"SLURM_JOB_ID": "7"})
    assert slurm_commands.calls("scancel") == [["7"]]
    assert "the run's job.json is broken" in capfd.readouterr().err
