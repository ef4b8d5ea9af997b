"""Attempts and sweeps run on one machine, without Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hpc_ddp.core import process
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError, UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.task_folder import make_task
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import dry_run
from hpc_ddp.node.dry_run import DryRun
from hpc_ddp.node.outcome.first_failure import Failure
from hpc_ddp.node.outcome.verdict import Verdict
from hpc_ddp.node.preflight import driver
from tests.raw_events import raw, raw_events
from unit.fakes import Clock, raise_disk_full, stop_clock


class Child:
    """A supervisor that is signalled, and ends when it is told or after some looks."""

    def __init__(self, looks: int = 1 << 30) -> None:
        self.looks = looks
        self.calls: list[str] = []

    def poll(self) -> int | None:
        self.looks -= 1
        return None if self.looks > 0 else 0

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")
        self.looks = 0


def _local(**values: Any) -> DryRun:
    local_run = DryRun.__new__(DryRun)
    local_run.notified, local_run.is_hurried, local_run._noticed_at = False, False, 0.0
    local_run.parent, local_run.supervisors = os.getppid(), []
    for name, value in values.items():
        setattr(local_run, name, value)
    return local_run


def test_a_third_signal_kills_the_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = stop_clock(monkeypatch, dry_run)
    children: Any = [Child(), Child()]
    local_run = _local(supervisors=children)
    for hurried in (False, False, True):
        local_run._handle_signal(signal.SIGTERM, None)
        assert local_run.is_hurried == hurried
        if not hurried:
            clock.now += 0.6  # the second comes too soon: timeout(1) signals twice
    assert [child.calls for child in children] == [["terminate"]] * 2
    clock.now += 1.0
    local_run._handle_signal(signal.SIGINT, None)
    assert [child.calls for child in children] == [["terminate", "kill"]] * 2


def test_a_notice_sets_the_end_and_a_second_one_tears_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()
    attempt = run.claim_attempt({}, lambda identity: False)
    clock = stop_clock(monkeypatch, dry_run)
    monkeypatch.setattr(subprocess, "Popen", lambda argv, env: Child(3))
    spec = JobSpec("t.py", launcher="srun", signal="B:TERM@90")
    local_run = _local(run=run, spec=spec, nodes=["local-0"], notified=True)
    local_run.command = ["python", "t.py"]
    environ = {"HPC_DDP_RUN": str(run.path), "HPC_DDP_ATTEMPT": "0", "HPC_DDP_END_TIME": ""}
    local_run._supervise(environ)
    assert float(attempt.end_time.read_text()) == pytest.approx(clock.now + 90, abs=1)
    assert not attempt.failed.read_text()
    assert "a signal: the workers may stop and save, for 90 s" in capfd.readouterr().err
    local_run.is_hurried = True
    local_run._supervise(environ)
    assert attempt.failed.read_text() == "a second signal"
    assert "a second signal: the workers are killed" in capfd.readouterr().err


def test_signals_wait_until_supervisors_can_handle_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[set[int]] = []

    def start(argv: list[str], env: dict[str, str]) -> Child:
        masks.append({*signal.pthread_sigmask(signal.SIG_BLOCK, ())})
        return Child(1)

    monkeypatch.setattr(subprocess, "Popen", start)
    local_run = _local(
        run=RunFolder(tmp_path), spec=JobSpec("t.py", launcher="srun"), nodes=["local-0"]
    )
    local_run.command = ["python", "t.py"]
    local_run._supervise({"HPC_DDP_RUN": str(tmp_path), "HPC_DDP_END_TIME": ""})
    masks.append({*signal.pthread_sigmask(signal.SIG_BLOCK, ())})
    notices = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    assert (masks[0] & notices, masks[1] & notices) == (notices, set())


@pytest.mark.parametrize(
    ("spec", "end", "launcher"),
    [
        ({"time": "10"}, True, "torchrun"),
        ({"launcher": "srun", "nproc_per_node": 2}, False, "worker"),
    ],
)
def test_each_node_has_a_supervisor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: dict[str, Any],
    end: bool,
    launcher: str,
) -> None:
    run = RunFolder(tmp_path / "name" / "id" / "task-1").make()
    attempt = run.claim_attempt({}, lambda identity: False)
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(argv: list[str], env: dict[str, str]) -> Child:
        started.append((argv, env))
        return Child(3)

    stop_clock(monkeypatch, dry_run)
    monkeypatch.setattr(subprocess, "Popen", start)
    nodes = ["local-0", "local-1"]
    job = JobSpec("t.py", nodes=2, **spec)
    local_run = _local(
        run=run, spec=job, nodes=nodes, command=["python", "-u", "node.py", "elastic_agent", "t.py"]
    )
    environ = local_run._make_environ(attempt)
    assert environ["HPC_DDP_END_TIME"] == ("1600" if end else "")
    assert (environ["HPC_DDP_HEAD"], environ["HPC_DDP_RDZV_ID"]) == ("127.0.0.1", "id-task-1.0")
    assert (environ["HPC_DDP_NNODES"], environ["HPC_DDP_RUN"]) == ("2", str(run.path))
    assert 10000 <= int(environ["HPC_DDP_PORT"]) <= 32767
    local_run._supervise(environ)
    assert [argv[3] for argv, _ in started] == [launcher] * (2 * job.tasks_per_node)
    assert [env["SLURM_PROCID"] for _, env in started] == [str(i) for i in range(len(started))]
    children: Any = local_run.supervisors
    assert all(child.calls == [] for child in children)


@pytest.mark.parametrize(
    ("values", "call", "after_s"),
    [
        ({"notified": True}, "terminate", 0.0),
        ({"parent": -1}, "terminate", 0.1),  # nobody watches any more
        ({}, "kill", 30.0),
    ],
)
def test_late_supervisors_are_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    call: str,
    after_s: float,
) -> None:
    clock = Clock(0.0)
    called_at: list[float] = []

    class Deaf(Child):
        def terminate(self) -> None:
            super().terminate()
            called_at.append(clock.now)
            self.looks = 0

        def kill(self) -> None:
            super().kill()
            called_at.append(clock.now)

    monkeypatch.setattr(dry_run, "time", clock)
    monkeypatch.setattr(subprocess, "Popen", lambda argv, env: Deaf())
    local_run = _local(
        run=RunFolder(tmp_path), spec=JobSpec("t.py", launcher="srun"), nodes=["local-0"]
    )
    local_run.command = ["python", "t.py"]
    for name, value in values.items():
        setattr(local_run, name, value)
    local_run._supervise({"HPC_DDP_RUN": str(tmp_path), "HPC_DDP_END_TIME": "5"})
    children: Any = local_run.supervisors
    assert children[0].calls == [call]
    begin = 5.0 if call == "kill" else 0.0
    assert begin + after_s <= called_at[0] < begin + after_s + 0.3


def test_each_task_knows_its_place() -> None:
    local_run = _local(nodes=["local-0", "local-1"])
    names = ("HPC_DDP_NODE_INDEX", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    tasks = [local_run._task_env(index, 2) for index in range(4)]
    assert [[task[name] for name in names] for task in tasks] == [
        ["0", "0", "0", "4"],
        ["0", "1", "1", "4"],
        ["1", "2", "0", "4"],
        ["1", "3", "1", "4"],
    ]


@pytest.mark.parametrize(
    ("decided", "notified", "code"),
    [
        ([(Action.REQUEUE, 0), (Action.NONE, 0)], False, 0),
        ([(Action.GIVE_UP, 3)], False, 3),
        ([(Action.REQUEUE, 0)], True, 75),
        ([(Action.NONE, 0)], True, 0),
    ],
)
def test_attempts_are_played_until_one_is_the_last(
    decided: list[tuple[Action, int]], notified: bool, code: int
) -> None:
    local_run = _local(notified=notified)
    verdicts = iter([Verdict(Cause.FAILED, action, "", number) for action, number in decided])
    local_run.run_attempt = lambda: next(verdicts)  # type: ignore[method-assign]
    assert local_run.play() == code
    assert next(verdicts, None) is None


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """The handlers by signal; none is set for this process."""
    result: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", lambda number, handler: result.update({number: handler}))
    return result


def _run(tmp_path: Path, **values: Any) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "id").make()
    run.job_json.write_text(JobSpec("t.py", **values).to_json())
    return run


@pytest.mark.parametrize(
    ("wanted", "fit", "expected"),
    [
        (True, True, ["preflight", "supervise"]),
        (True, False, ["preflight"]),
        (False, False, ["supervise"]),
    ],
)
def test_an_attempt_has_a_preflight_then_supervisors_then_a_verdict(
    tmp_path: Path,
    handlers: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
    wanted: bool,
    fit: bool,
    expected: list[str],
) -> None:
    run = _run(tmp_path, nodes="1-2", preflight=wanted)
    local_run = DryRun(run, ["python", "t.py"])
    assert handlers.keys() == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    calls: list[str] = []

    def examine(run: RunFolder, nodes: list[str], commands: Any, notice: Any) -> dict[str, Any]:
        assert nodes == ["local-0", "local-1"]
        assert [command.node for command in commands] == nodes
        assert [command.env["HPC_DDP_NODE_INDEX"] for command in commands] == ["0", "1"]
        assert list(commands[0].argv) == ["python", str(run.lib / "node.py"), "preflight.checks"]
        assert notice() == ""
        handlers[signal.SIGINT](signal.SIGINT, None)
        assert notice() == "SIGTERM"
        calls.append("preflight")
        return {"ok": fit}

    def judge_attempt(run: RunFolder, attempt: Any, environ: dict[str, str], **options: Any) -> Any:
        calls.append(environ["HPC_DDP_ATTEMPT"])
        assert options == {"job": None, "goes_on": not local_run.notified}
        return "facts", Verdict(Cause.FINISHED, Action.NONE, "", 0)

    monkeypatch.setattr(driver, "examine_nodes", examine)
    monkeypatch.setattr(driver, "record_outcome", lambda run, attempt, result: result["ok"])
    monkeypatch.setattr(dry_run, "judge_attempt", judge_attempt)
    monkeypatch.setattr(local_run, "_supervise", lambda environ: calls.append("supervise"))
    assert local_run.run_attempt() == Verdict(Cause.FINISHED, Action.NONE, "", 0)
    assert calls == [*expected, "0"]
    (event,) = raw_events(run.path)
    assert (event["event"], event["nodes"]) == ("started", ["local-0", "local-1"])
    assert event["pid"] == os.getpid()
    local_run.notified = False
    local_run.run_attempt()  # that of the same process before it is over
    assert calls[-1] == "1"


@pytest.mark.parametrize(
    ("error", "is_said"),
    [
        ("AssertionError: Torch not compiled with CUDA enabled", True),
        ("RuntimeError: nccl2 requires at least one CUDA device", True),
        ("RuntimeError: Distributed package doesn't have NCCL built in", True),
        ("ValueError: boom", False),
    ],
)
def test_a_script_that_names_a_gpu_is_told_that_there_is_none(
    tmp_path: Path,
    handlers: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: str,
    is_said: bool,
) -> None:
    local_run = DryRun(_run(tmp_path), ["python", "t.py"])
    facts = SimpleNamespace(failure=Failure(0, "local-0", 1, 0.0, error))
    verdict = Verdict(Cause.FAILED, Action.GIVE_UP, "", 1)
    monkeypatch.setattr(dry_run, "judge_attempt", lambda *args, **options: (facts, verdict))
    monkeypatch.setattr(local_run, "_supervise", lambda environ: None)
    assert local_run.run_attempt() == verdict
    assert ("a dry run has CPUs and gloo only" in capfd.readouterr().err) == is_said


def test_supervisors_continue_while_the_parent_lives(
    tmp_path: Path, handlers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "time", Clock())
    monkeypatch.setattr(subprocess, "Popen", lambda argv, env: Child(3))
    local_run = DryRun(_run(tmp_path, launcher="srun"), ["python", "t.py"])
    local_run._supervise({"HPC_DDP_RUN": str(tmp_path), "HPC_DDP_END_TIME": ""})
    children: Any = local_run.supervisors
    assert [child.calls for child in children] == [[]]


def test_a_parent_that_has_ended_before_is_noticed(
    tmp_path: Path, handlers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_DDP_PARENT", str(os.getppid() + 1))
    monkeypatch.setattr(dry_run, "time", Clock())
    monkeypatch.setattr(subprocess, "Popen", lambda argv, env: Child(3))
    local_run = DryRun(_run(tmp_path, launcher="srun"), ["python", "t.py"])
    environ = {"HPC_DDP_RUN": str(local_run.run.path), "HPC_DDP_END_TIME": ""}
    local_run.run.attempt(0).path.mkdir(parents=True)
    local_run._supervise(environ)
    children: Any = local_run.supervisors
    assert [child.calls for child in children] == [["terminate"]]


def test_an_attempt_beyond_the_budget_does_not_begin(
    tmp_path: Path, handlers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "gpu_hours", lambda run, gpus, now=None: 5.0)
    run = _run(tmp_path, budget_gpu_hours=4.0)
    with pytest.raises(HpcDdpError, match="GPU"):
        DryRun(run, ["python", "t.py"]).run_attempt()
    assert not run.attempts()


def test_a_run_that_another_process_plays_is_refused(
    tmp_path: Path, handlers: dict[int, Any]
) -> None:
    run = _run(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as child:
        owner = {**process.identity(), "pid": child.pid, "began": process._began(child.pid)}
        run.claim_attempt(owner, lambda identity: False)
        with pytest.raises(HpcDdpError, match="is already being run"):
            DryRun(run, ["python", "t.py"]).run_attempt()
        child.kill()


class Played:
    """A task of a sweep that ends at once, with a code that a test has laid down."""

    codes: ClassVar[dict[int, int]] = {}
    calls: ClassVar[list[tuple[int, list[str]]]] = []
    noticed: ClassVar[int | None] = None

    def __init__(self, run: RunFolder, command: list[str]) -> None:
        self.run, self.command, self.notified = run, command, False

    def play(self) -> int:
        assert not self.run.cancelled.exists()
        self.calls.append((self.run.index, self.command))
        self.notified = self.noticed == self.run.index
        return self.codes.get(self.run.index, 0)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(dry_run, "DryRun", Played)
    monkeypatch.setattr(Played, "codes", {})
    monkeypatch.setattr(Played, "calls", [])
    monkeypatch.setattr(Played, "noticed", None)
    run = _run(tmp_path, sweep={"lr": ("1", "2", "3", "4")}, array="1-3")
    monkeypatch.setenv("HPC_DDP_RUN", str(run.path))
    return run


def _indexes() -> list[int]:
    return [index for index, _ in Played.calls]


def test_the_tasks_of_a_sweep_are_played_one_after_the_other(
    sweep: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep.cancelled.touch()
    make_task(sweep, 2).cancelled.touch()  # both of an earlier start
    Played.codes = {2: 3, 3: 4}
    assert dry_run.main(["python", "t.py"]) == 3
    words = [(index, ["python", "t.py", f"--lr={index + 1}"]) for index in (1, 2, 3)]
    assert Played.calls == words
    assert "task 2: --lr=3" in "".join(capfd.readouterr())
    assert raw_events(sweep.path)[0]["pid"] == os.getpid()


def test_a_task_that_is_finished_is_not_played_again(sweep: RunFolder) -> None:
    journal = make_task(sweep, 2).journal("batch")
    journal.write(raw("verdict", cause="finished", action="none", why="", exit_code=0))
    assert make_task(sweep, 2).finished()
    assert dry_run.main(["python", "t.py"]) == 0
    assert _indexes() == [1, 3]


@pytest.mark.parametrize(("code", "expected"), [(0, 75), (3, 3)])
def test_a_sweep_ends_after_a_notice(sweep: RunFolder, code: int, expected: int) -> None:
    Played.noticed, Played.codes = 2, {2: code}
    assert dry_run.main(["python", "t.py"]) == expected
    assert _indexes() == [1, 2]


def test_a_sweep_ends_once_it_is_cancelled(
    sweep: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Played.play

    def play_and_cancel(played: Played) -> int:
        sweep.cancelled.touch()
        return play(played)

    monkeypatch.setattr(Played, "play", play_and_cancel)
    assert dry_run.main(["python", "t.py"]) == 75
    assert _indexes() == [1]


def test_a_task_that_is_cancelled_while_another_one_runs_is_passed_over(
    sweep: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    play = Played.play

    def play_and_cancel(played: Played) -> int:
        make_task(sweep, 2).cancelled.touch()
        return play(played)

    monkeypatch.setattr(Played, "play", play_and_cancel)
    assert dry_run.main(["python", "t.py"]) == 75
    assert _indexes() == [1, 3]
    assert "task 2 is cancelled" in "".join(capfd.readouterr())


def test_a_run_that_is_finished_is_not_played(
    sweep: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep.journal("batch").write(
        raw("verdict", cause="finished", action="none", why="", exit_code=0)
    )
    assert dry_run.main(["python", "t.py"]) == 0
    assert _indexes() == []
    assert f"run {sweep.path} is finished" in "".join(capfd.readouterr())


def test_an_error_is_printed_with_its_exit_code(
    sweep: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(run: RunFolder, index: int) -> None:
        raise HpcDdpError("no GPU hours are left")

    monkeypatch.setattr(dry_run, "make_task", refuse)
    assert dry_run.main(["python", "t.py"]) == 1
    assert "no GPU hours are left" in "".join(capfd.readouterr())


def test_a_job_that_is_no_sweep_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: dict[int, Any]
) -> None:
    run = _run(tmp_path)
    run.cancelled.touch()
    monkeypatch.setenv("HPC_DDP_RUN", str(run.path))
    monkeypatch.setattr(DryRun, "play", lambda local_run: len(local_run.nodes) + 6)
    assert dry_run.main(["python", "t.py"]) == 7
    assert not run.cancelled.exists()


@pytest.fixture
def planned_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The run that `dry_run.main` is to play; signals stay as they are."""
    run = RunFolder(tmp_path / "train" / "20260101-000000-abcd").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    monkeypatch.setenv("HPC_DDP_RUN", str(run.path))
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    return run


@pytest.mark.usefixtures("planned_run")
def test_a_dry_run_on_a_full_disk_can_be_continued(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunFolder, "claim_attempt", raise_disk_full)
    assert dry_run.main(["python", "train.py"]) == CAN_GO_ON
    assert "No space left on device" in capfd.readouterr().err


@pytest.mark.usefixtures("planned_run")
def test_an_error_of_a_dry_run_has_its_hint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("the budget is used up", hint="--max-gpu-hours 3")

    monkeypatch.setattr(dry_run, "enforce_budget", refuse)
    assert dry_run.main(["python", "train.py"]) == UsageError.exit_code
    assert "used up\nhpc-ddp: hint: --max-gpu-hours 3" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("tool", "is_notified", "expected"),
    [
        ("exit 0", False, "tree-1"),
        ("exit 1", False, "no"),
        ("exec sleep 600", True, "no"),
        (None, False, "no"),
    ],
    ids=["there", "failed", "a notice", "without timeout"],
)
def test_a_copy_is_brought_until_a_notice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tool: str | None,
    is_notified: bool,
    expected: str,
) -> None:
    run = RunFolder(tmp_path / "name" / "run").make()
    local_run = _local(run=run, command=["python"], notified=is_notified)
    assert local_run._unpack_parcel({}) == ""
    (run.path / "stage").mkdir()
    (run.path / "stage" / "label").write_text("part tree-1 1 1\n")
    if tool:
        (tmp_path / "timeout").write_text(f"#!/bin/sh\n{tool}\n")
        (tmp_path / "timeout").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}" if tool else str(tmp_path)
    monkeypatch.setenv("PATH", path)
    assert local_run._unpack_parcel({"PATH": path}) == expected
    run.unstaged.touch()
    assert local_run._unpack_parcel({"PATH": path}) == ""


def test_an_attempt_that_can_not_go_on_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("hpc_ddp.node.workers.staging.removal.run_stage_script", calls.append)
    monkeypatch.setattr(DryRun, "_train", lambda *words: raise_disk_full())
    run = _run(tmp_path, stage=True, preflight=False)
    local_run = _local(
        run=run, spec=JobSpec.from_json(run.job_json.read_bytes()), nodes=["local-0"]
    )
    with pytest.raises(OSError, match="space"):
        local_run.run_attempt()
    assert calls == ["tidy"]
