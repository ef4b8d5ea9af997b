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
from typing import Any

import pytest
from fakes import Clock

from hpc_ddp.node import growth, local, network, worker
from hpc_ddp.node.growth import Growth
from hpc_ddp.node.local import LocalRun
from hpc_ddp.node.verdict import Verdict
from hpc_ddp.run.folder import NodeFolder, RunFolder
from hpc_ddp.run.spec import JobSpec
from tests.waiting import wait_until

# --- its start -----------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Start a worker of two nodes with two workers each, as torchrun would."""

    def run(rank: int = 2, local: int = 0, **environ: str) -> subprocess.CompletedProcess[bytes]:
        env = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(local), "PATH": os.environ["PATH"]}
        env |= {"HPC_DDP_RUN": "/r", "HPC_DDP_NODE_FOLDER": str(tmp_path)}
        env |= {"HPC_DDP_AGENT_PID": str(os.getpid()), "SLURM_PROCID": "1", **environ}
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "PYTHONPATH")
        look = f"import json, os; print(json.dumps([os.environ[n] for n in {names}]))"
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
    assert int((tmp_path / "rank-2.pid").read_text()) > 1
    start(HPC_DDP_CODE="/c", PYTHONPATH="/p")
    first, again, second = log.read_bytes().splitlines()
    assert again + b"\n" == worker.AGAIN
    assert json.loads(second)[-1] == "/r/lib:/c:/p"
    (tmp_path / "rank-0.pid").touch()
    start(rank=3, local=1)
    assert (tmp_path / "rank-0.pid").exists()  # the first worker of the node looks after them
    assert first


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
            assert not _is_over(int(number.read_text()))
        finally:
            agent.kill()
    wait_until(lambda: _is_over(int(number.read_text())), "the worker's end")


@pytest.mark.parametrize(("world", "by_node"), [("2", "2"), ("6", "2(x3)")])
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
    clock = Clock()
    monkeypatch.setattr(worker, "time", clock)
    with pytest.raises(FileNotFoundError):
        worker.open_log(str(tmp_path / "gone" / "rank-0"))
    assert worker.PATIENCE_S < sum(clock.slept) <= worker.PATIENCE_S + 2

    def come_back(seconds: float) -> None:
        (tmp_path / "gone").mkdir()

    monkeypatch.setattr(clock, "sleep", come_back)
    os.close(worker.open_log(str(tmp_path / "gone" / "rank-0")))
    assert (tmp_path / "gone" / "rank-0.pid").read_text() == str(os.getpid())


# --- what it prints ------------------------------------------------------------------------


def test_logs_that_grow_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(5.0)
    monkeypatch.setattr(growth, "time", clock)
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
    for _ in range(growth.LIST_EVERY):
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
    for _ in range(growth.LIST_EVERY - 1):
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


def _local(**values: Any) -> LocalRun:
    local_run = LocalRun.__new__(LocalRun)
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

    monkeypatch.setattr(local, "time", Clock())
    monkeypatch.setattr(subprocess, "Popen", start)
    nodes = ["local-0", "local-1"]
    job = JobSpec("t.py", nodes=2, **spec)
    local_run = _local(
        run=run, spec=job, nodes=nodes, command=["python", "node.py", "agent", "t.py"]
    )
    environ = local_run._environ(attempt)
    assert environ["HPC_DDP_END_TIME"] == ("1600" if end else "")
    assert (environ["HPC_DDP_HEAD"], environ["HPC_DDP_RDZV_ID"]) == ("127.0.0.1", "id-task-1.0")
    assert (environ["HPC_DDP_NODES"], environ["HPC_DDP_RUN"]) == ("local-0 local-1", str(run.path))
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

    monkeypatch.setattr(local, "time", clock)
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
        ([("requeue", 0), ("none", 0)], False, 0),
        ([("give up", 3)], False, 3),
        ([("requeue", 0)], True, 75),
        ([("none", 0)], True, 0),
    ],
)
def test_attempts_are_played_until_one_is_the_last(
    decided: list[tuple[str, int]], notified: bool, code: int
) -> None:
    local_run = _local(notified=notified)
    verdicts = iter([Verdict("", action, "", number) for action, number in decided])
    local_run.attempt = lambda: next(verdicts)  # type: ignore[method-assign]
    assert local_run.play() == code
    assert next(verdicts, None) is None
