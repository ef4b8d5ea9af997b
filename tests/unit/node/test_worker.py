"""What stands around a worker: its start, its log, its node's network, what it prints."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hpc_ddp.core import process
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.journal.vocabulary import Action, Cause
from hpc_ddp.core.run_folder import NodeFolder, RunFolder
from hpc_ddp.node import dry_run, log_offsets, worker
from hpc_ddp.node.batch import task_of
from hpc_ddp.node.dry_run import DryRun
from hpc_ddp.node.log_offsets import Growth
from hpc_ddp.node.net import network
from hpc_ddp.node.outcome.verdict import Verdict
from hpc_ddp.node.preflight import driver
from tests.raw_events import raw, raw_events
from tests.waiting import pid_in, wait_until
from unit.fakes import Clock, stop_clock

# --- its start -----------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Start a worker of two nodes with two workers each, as torchrun would."""

    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "PYTHONPATH")
    of_slurm = f"import json, os; print(json.dumps([os.environ[n] for n in {names}]))"

    def run(
        rank: int = 2, local: int = 0, look: str = of_slurm, **environ: str
    ) -> subprocess.CompletedProcess[bytes]:
        env = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(local), "PATH": os.environ["PATH"]}
        env |= {"HPC_DDP_RUN": "/r", "HPC_DDP_NODE_FOLDER": str(tmp_path)}
        env |= {"HPC_DDP_AGENT_PID": str(os.getpid()), "SLURM_PROCID": "1", **environ}
        argv = worker.started_by(sys.executable, ["-c", look])
        return subprocess.run(argv, env=env, capture_output=True)

    return run


def test_a_worker_has_a_log_and_slurms_variables_of_its_own(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    for rank in (1, 3, 4):
        (tmp_path / f"rank-{rank}.pid").touch()  # of an earlier start with other ranks
    (tmp_path / "rank-4.log").touch()
    done = start()
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    log = tmp_path / "rank-2.log"
    assert json.loads(log.read_text()) == ["2", "0", "1", "4", "/r/lib"]
    assert log.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.glob("*.pid")} == {"rank-2.pid", "rank-3.pid"}
    assert pid_in(tmp_path / "rank-2.pid") > 1
    start(HPC_DDP_CODE="/c", PYTHONPATH="/p")
    first, again, second = log.read_bytes().splitlines()
    assert again + b"\n" == worker.AGAIN
    assert json.loads(second)[-1] == "/r/lib:/c:/p"
    (tmp_path / "rank-0.pid").touch()
    start(rank=3, local=1)
    assert (tmp_path / "rank-0.pid").exists()  # the first worker of the node looks after them
    assert first


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_workers_are_no_task_of_an_mpi_unless_each_of_them_is_one(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path, by_torchrun: bool
) -> None:
    of_task = {"PMI_RANK": "1", "PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "PMI2_FD": "3"}
    settings = {"OMPI_MCA_btl": "tcp", "I_MPI_FABRICS": "ofi"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if by_torchrun else {}
    names = [*of_task, *settings]
    look = f"import json, os; print(json.dumps([n for n in {names} if n in os.environ]))"
    start(look=look, **of_task, **settings, **agent)
    kept = json.loads((tmp_path / "rank-2.log").read_text())
    assert kept == (list(settings) if by_torchrun else names)


def test_a_script_has_the_users_umask(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    """The node side takes the group's right to write from its own files only."""
    look = "import os; print(oct(os.umask(0)), 'HPC_DDP_UMASK' in os.environ)"
    start(look=look, HPC_DDP_UMASK="2")
    assert (tmp_path / "rank-2.log").read_text() == "0o2 False\n"


def test_a_worker_whose_agent_has_died_does_not_begin(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    done = start(HPC_DDP_AGENT_PID="1")
    assert done.returncode == 1
    assert b"what has started this worker has died" in done.stderr
    assert not list(tmp_path.iterdir())


def _is_over(pid: int) -> bool:
    """Tell whether a process has ended, also where nobody has asked for its code."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_a_worker_prints_into_its_log_and_ends_with_its_agent(tmp_path: Path) -> None:
    code = "import sys, time; print('out'); print('error', file=sys.stderr); time.sleep(900)"
    words = " ".join(shlex.quote(word) for word in worker.started_by(sys.executable, ["-c", code]))
    names = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    names |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    names |= {"HPC_DDP_RUN": "/r", "HPC_DDP_NODE_FOLDER": str(tmp_path)}
    script = f"export HPC_DDP_AGENT_PID=$$; {words} & wait"
    log, number = tmp_path / "rank-0.log", tmp_path / "rank-0.pid"
    with subprocess.Popen(["bash", "-c", script], env={**os.environ, **names}) as agent:
        try:
            wait_until(lambda: log.exists() and log.read_text() == "out\nerror\n", "both lines")
            assert not _is_over(pid_in(number))
        finally:
            agent.kill()
    wait_until(lambda: _is_over(pid_in(number)), "the worker's end")


@pytest.mark.parametrize(("world", "by_node"), [("2", "2"), ("4", "2(x2)"), ("6", "2(x3)")])
def test_tasks_by_node_as_slurm_writes_them(
    world: str, by_node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": "2"}
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        values[name] = "1"
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    variables = worker.as_task()
    assert variables["SLURM_TASKS_PER_NODE"] == variables["SLURM_STEP_TASKS_PER_NODE"] == by_node
    assert {variables[f"SLURM_{name}"] for name in ("NTASKS", "NPROCS", "STEP_NUM_TASKS")} == {
        world
    }
    assert variables["SLURM_NTASKS_PER_NODE"] == "2"


def test_a_disk_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = stop_clock(monkeypatch, worker)
    with pytest.raises(FileNotFoundError):
        worker.open_log(str(tmp_path / "gone" / "rank-0"))
    assert worker.PATIENCE_S < sum(clock.slept) <= worker.PATIENCE_S + 2

    def come_back(seconds: float) -> None:
        (tmp_path / "gone").mkdir()

    monkeypatch.setattr(clock, "sleep", come_back)
    os.close(worker.open_log(str(tmp_path / "gone" / "rank-0")))
    assert process.live_pid(tmp_path / "gone" / "rank-0.pid") == os.getpid()


# --- what it prints ------------------------------------------------------------------------


def test_logs_that_grow_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    node.rank_log(1).write_text("b")
    for _ in range(log_offsets.LIST_EVERY - 1):
        notes.note()
    assert len(node.printed.read_text().splitlines()) == 1
    notes.note()
    assert len(node.printed.read_text().splitlines()) == 2


# --- its node's network --------------------------------------------------------------------


def test_a_node_alone_is_reached_by_loopback() -> None:
    assert network.reach(["n1"], 0, "-ib") == "127.0.0.1"
    assert network.reach(["n1", "n2"], 1, "-ib") == "n2-ib"


def test_a_free_port_is_the_next_one() -> None:
    free = network.free_port(20000)
    with socket.create_server(("", free)):
        assert network.free_port(free) > free >= 20000
    first, last = network.FIRST_PORT, network.LAST_PORT
    assert all(first <= network.free_port(start) <= last for start in (0, last + 1, 70000))


def test_the_last_port_is_followed_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {network.FIRST_PORT + 1}
    tried: list[int] = []

    class Probe:
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *error: object) -> None:
            return

        def bind(self, address: tuple[str, int]) -> None:
            tried.append(address[1])
            if address[1] not in free:
                raise OSError

    monkeypatch.setattr(socket, "socket", Probe)
    assert network.free_port(network.LAST_PORT) == network.FIRST_PORT + 1
    assert tried == [network.LAST_PORT, network.FIRST_PORT, network.FIRST_PORT + 1]
    free.clear()
    tried.clear()
    with pytest.raises(OSError, match="no free port between 10000 and 32767"):
        network.free_port(0)
    assert len(set(tried)) == network.LAST_PORT - network.FIRST_PORT + 1


def test_loopback_leads_to_itself() -> None:
    assert network.interface_to("127.0.0.1") == "lo"
    assert network.interface_to("::1") is None  # none of IPv4
    assert network.address_of("lo") == "127.0.0.1"
    assert network.address_of("no-such0") is None
    assert "127.0.0.1" in network.addresses()


# --- an attempt on one machine -------------------------------------------------------------


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
    local_run.notified, local_run.parent, local_run.supervisors = False, os.getppid(), []
    for name, value in values.items():
        setattr(local_run, name, value)
    return local_run


def test_a_second_signal_is_no_notice() -> None:
    children: Any = [Child(), Child()]
    local_run = _local(supervisors=children)
    local_run._notify(signal.SIGTERM, None)
    local_run._notify(signal.SIGINT, None)
    assert [child.calls for child in children] == [["terminate", "kill"]] * 2


@pytest.mark.parametrize(
    ("spec", "end", "launcher"),
    [
        ({"time": "10"}, True, "supervisor"),
        ({"launcher": "srun", "nproc_per_node": 2}, False, "task"),
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
    attempt = run.claim_attempt({}, lambda info: False)
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(argv: list[str], env: dict[str, str]) -> Child:
        started.append((argv, env))
        return Child(3)

    stop_clock(monkeypatch, dry_run)
    monkeypatch.setattr(subprocess, "Popen", start)
    nodes = ["local-0", "local-1"]
    job = JobSpec("t.py", nodes=2, **spec)
    local_run = _local(
        run=run, spec=job, nodes=nodes, command=["python", "node.py", "agent", "t.py"]
    )
    environ = local_run._environ(attempt)
    assert environ["HPC_DDP_END_TIME"] == ("1600" if end else "")
    assert (environ["HPC_DDP_HEAD"], environ["HPC_DDP_RDZV_ID"]) == ("127.0.0.1", "id-task-1.0")
    assert (environ["HPC_DDP_NNODES"], environ["HPC_DDP_RUN"]) == ("2", str(run.path))
    assert 10000 <= int(environ["HPC_DDP_PORT"]) <= 32767
    local_run._supervise(environ)
    assert [argv[2] for argv, _ in started] == [launcher] * (2 * job.tasks_per_node)
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
    local_run._supervise({"HPC_DDP_END_TIME": "5"})
    children: Any = local_run.supervisors
    assert children[0].calls == [call]
    begin = 5.0 if call == "kill" else 0.0
    assert begin + after_s <= called_at[0] < begin + after_s + 0.3


def test_each_task_knows_its_place() -> None:
    local_run = _local(nodes=["local-0", "local-1"])
    names = ("HPC_DDP_NODE_INDEX", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    tasks = [local_run._task(index, 2) for index in range(4)]
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
    local_run.attempt = lambda: next(verdicts)  # type: ignore[method-assign]
    assert local_run.play() == code
    assert next(verdicts, None) is None


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What signals are handled by; nothing is set for this process."""
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
def test_an_attempt_is_judged_after_it_was_looked_at_and_played(
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

    def judge(run: RunFolder, attempt: Any, environ: dict[str, str], job: None) -> Any:
        calls.append(environ["HPC_DDP_ATTEMPT"])
        return "facts", Verdict(Cause.FINISHED, Action.NONE, "", 0)

    monkeypatch.setattr(driver, "examine", examine)
    monkeypatch.setattr(driver, "conclude", lambda run, attempt, result: result["ok"])
    monkeypatch.setattr(dry_run, "judge", judge)
    monkeypatch.setattr(local_run, "_supervise", lambda environ: calls.append("supervise"))
    assert local_run.attempt() == Verdict(Cause.FINISHED, Action.NONE, "", 0)
    assert calls == [*expected, "0"]
    (event,) = raw_events(run.path)
    assert (event["event"], event["nodes"]) == ("started", ["local-0", "local-1"])
    assert event["pid"] == os.getpid()
    local_run.notified = False
    local_run.attempt()  # that of the same process before it is over
    assert calls[-1] == "1"


def test_supervisors_go_on_while_somebody_watches(
    tmp_path: Path, handlers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "time", Clock())
    monkeypatch.setattr(subprocess, "Popen", lambda argv, env: Child(3))
    local_run = DryRun(_run(tmp_path, launcher="srun"), ["python", "t.py"])
    local_run._supervise({"HPC_DDP_END_TIME": ""})
    children: Any = local_run.supervisors
    assert [child.calls for child in children] == [[]]


def test_an_attempt_beyond_the_budget_does_not_begin(
    tmp_path: Path, handlers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "gpu_hours", lambda run, gpus, now=None: 5.0)
    run = _run(tmp_path, budget_gpu_hours=4.0)
    with pytest.raises(HpcDdpError, match="GPU"):
        DryRun(run, ["python", "t.py"]).attempt()
    assert not run.attempts()


def test_a_run_that_another_process_plays_is_refused(
    tmp_path: Path, handlers: dict[int, Any]
) -> None:
    run = _run(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as other:
        info = {**process.identity(), "pid": other.pid, "began": process._began(other.pid)}
        run.claim_attempt(info, lambda info: False)
        with pytest.raises(HpcDdpError, match="is already being run"):
            DryRun(run, ["python", "t.py"]).attempt()
        other.kill()


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
    task_of(sweep, 2).cancelled.touch()  # both of an earlier start
    Played.codes = {2: 3, 3: 4}
    assert dry_run.main(["python", "t.py"]) == 3
    words = [(index, ["python", "t.py", f"--lr={index + 1}"]) for index in (1, 2, 3)]
    assert Played.calls == words
    assert "task 2: --lr=3" in "".join(capfd.readouterr())
    assert raw_events(sweep.path)[0]["pid"] == os.getpid()


def test_a_task_that_is_finished_is_not_played_again(sweep: RunFolder) -> None:
    journal = task_of(sweep, 2).journal("batch")
    journal.write(raw("verdict", cause="finished", action="none", why="", exit_code=0))
    assert task_of(sweep, 2).finished()
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


def test_a_run_that_is_finished_is_not_played(
    sweep: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep.journal("batch").write(
        raw("verdict", cause="finished", action="none", why="", exit_code=0)
    )
    assert dry_run.main(["python", "t.py"]) == 0
    assert _indexes() == []
    assert f"run {sweep.path} is finished" in "".join(capfd.readouterr())


def test_trouble_is_said_with_its_exit_code(
    sweep: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(run: RunFolder, index: int) -> None:
        raise HpcDdpError("no GPU hours are left")

    monkeypatch.setattr(dry_run, "task_of", refuse)
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
