"""Launches of torchrun on a node, or of one worker that srun starts."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.node import child_process, supervisor
from hpc_ddp.node.child_process import fill_options, split_words, torchrun_launch, worker_launch
from hpc_ddp.node.outcome import first_failure
from hpc_ddp.node.outcome import oom as oom_module
from hpc_ddp.node.supervisor import Supervisor
from hpc_ddp.node.watch import log_offsets, look_times
from tests.waiting import wait_until
from unit.fakes import Clock, stop_clock
from unit.node.fakes import NoSignals, place_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(oom_module, "count_kills", lambda: 0)
    return stop_clock(monkeypatch, supervisor, look_times, log_offsets, first_failure)


@pytest.fixture
def task(attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Supervisor]:
    """Make the supervisor of a rank of six, two on each node."""

    def make(rank: int) -> Supervisor:
        values = {"SLURM_PROCID": rank, "SLURM_NTASKS": 6, "SLURM_LOCALID": rank % 2}
        named = {"HPC_DDP_HEAD": "n1", "HPC_DDP_PORT": 20001, "HPC_DDP_RDZV_ID": "7.0"}
        for name, value in {**values, **named}.items():
            monkeypatch.setenv(name, str(value))
        place = place_of(attempt, index=rank // 2)
        launch = worker_launch(place, ["python", "train.py"])
        return Supervisor(place, launch, NoSignals())

    return make


def test_a_worker_gets_the_variables_of_torchrun(
    task: Callable[[int], Supervisor], attempt: AttemptFolder
) -> None:
    watcher = task(3)
    env = watcher._make_env()
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
    assert [env[name] for name in names.split()] == ["3", "1", "6", "2", "1", "3"]
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("n1", "20001")
    assert env["TORCHELASTIC_RUN_ID"] == "7.0"
    assert watcher.launch.command[0] == "python"
    assert watcher.launch.command[-2:] == ["-u", "train.py"]
    assert (watcher.launch.name, watcher.folder) == ("n2-3", attempt.node("n2", 3))
    for rank in (2, 3):
        (attempt.path / "n2" / f"rank-{rank}.pid").touch()
    assert watcher.folder.pids() == [attempt.path / "n2" / "rank-3.pid"]
    peers = [f"n{rank // 2 + 1}/record-{rank}.json" for rank in range(6)]
    assert [str(path.relative_to(attempt.path)) for path in task(0).launch.peers] == peers
    assert watcher.launch.peers == []
    assert not watcher.launch.reports_fabric
    assert task(4).launch.reports_fabric


@pytest.mark.parametrize("kind", ["OMPI_COMM_WORLD", "PMI", "MV2_COMM_WORLD"])
def test_a_task_of_an_mpi_has_its_rank(
    kind: str, attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's variables are those of the MPI's daemon on this node."""
    for name, value in {"SLURM_PROCID": 1, "SLURM_NTASKS": 3, "HPC_DDP_PORT": 20001}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("HPC_DDP_STEP_LAUNCHER", "mpirun")
    monkeypatch.setenv(f"{kind}_RANK", "5")
    monkeypatch.setenv(f"{kind}_SIZE", "6")
    env = worker_launch(place_of(attempt, index=2), ["python", "train.py"]).env
    assert [env[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")] == [*"5162"]
    with pytest.raises(OSError, match="ranks have to go node by node"):
        worker_launch(place_of(attempt, index=1), ["python", "train.py"])
    for size in (1, 5):  # of three nodes
        monkeypatch.setenv(f"{kind}_SIZE", str(size))
        with pytest.raises(OSError, match=f"has started {size} workers on 3 nodes"):
            worker_launch(place_of(attempt, index=0), ["python", "train.py"])


def test_a_wrapper_that_dies_of_a_notice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(child_process, "say", printed.append)
    with subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE) as wrapper:
        environ = {"SLURM_TASK_PID": str(wrapper.pid)}
        name = Path(f"/proc/{wrapper.pid}/comm")
        wait_until(lambda: name.read_text() == "sh\n", "the wrapper's own program")
        child_process.warn_of_wrapper(environ)
    assert printed[0].startswith(
        "WARNING: this Python runs below sh, which dies of a preemption's signal"
    )
    printed.clear()
    child_process.warn_of_wrapper(environ)  # gone, as one that can't be seen from a container
    child_process.warn_of_wrapper({"SLURM_TASK_PID": str(os.getpid())})
    child_process.warn_of_wrapper({})
    assert printed == []


def test_only_the_first_task_shows_its_output(
    task: Callable[[int], Supervisor],
    attempt: AttemptFolder,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    attempt.node("n1").path.mkdir()
    attempt.node("n1").rank_log(0).write_bytes(b"of a try at another port\n")
    first, second = task(0), task(1)
    with open(attempt.node("n1").rank_log(0), "ab") as log:
        log.write(b"new\n")
    second.growth.note()
    assert capfdbinary.readouterr().out == b""
    first.growth.note()
    assert capfdbinary.readouterr().out == b"new\n"


@pytest.mark.parametrize(
    ("rank", "error", "is_taken"),
    [
        (0, "RuntimeError: EADDRINUSE, port: 20001", True),
        (0, "RuntimeError: EADDRINUSE, port: 80", False),
        (0, "RuntimeError: port 20001", False),
        (1, "RuntimeError: EADDRINUSE, port: 20001", False),
    ],
)
def test_a_port_that_was_taken_is_marked(
    task: Callable[[int], Supervisor],
    attempt: AttemptFolder,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    error: str,
    is_taken: bool,
) -> None:
    watcher = task(rank)
    watcher.folder.rank_log(rank).write_text(f"Traceback (most recent call last):\n  x\n{error}\n")
    failure = {"rank": rank, "code": 1, "time": 1000.0, "error": error, "last_line": ""}
    assert watcher._collect_failures(1) == [failure]
    assert attempt.port_taken.exists() is is_taken
    watcher.folder.failures.write_text('{"agent": "no python"}')
    assert watcher._collect_failures(127) == [
        {"rank": None, "code": 127, "time": 1000.0, "error": "no python", "last_line": ""}
    ]


@pytest.mark.parametrize(
    ("options", "variables", "is_undone"),
    [
        (["--nproc-per-node=2"], {"OMP_PROC_BIND": "spread", "OMP_PLACES": "threads"}, True),
        (["--nproc-per-node=gpu"], {"GOMP_CPU_AFFINITY": "0-3"}, True),
        (["--nproc-per-node=1"], {"OMP_PROC_BIND": "close"}, False),
        (["--nproc-per-node=2", "--numa-binding=node"], {"OMP_PROC_BIND": "close"}, False),
        (["--nproc-per-node=2"], {"OMP_PLACES": "", "OMP_NUM_THREADS": "4"}, False),
    ],
)
def test_workers_of_a_node_are_not_bound_to_the_same_cpus(
    attempt: AttemptFolder,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    variables: dict[str, str],
    is_undone: bool,
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(child_process, "say", printed.append)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = ["python", "-u", "node.py", "elastic_agent", *options, "train.py"]
    launch = torchrun_launch(place_of(attempt), command)
    assert ("OMP_PROC_BIND" in launch.env) is is_undone
    names = ", ".join(variables)
    expected = [f"note: {names} would bind all workers of a node to the same CPUs, and has no"]
    assert [line.partition(" effect")[0] for line in printed] == expected * is_undone
    torchrun_launch(place_of(attempt, index=1), command)
    assert len(printed) == is_undone


def test_variables_are_filled_in_for_torchrun_and_not_for_the_script() -> None:
    words = [
        "$A",
        "-u",
        "node.py",
        "elastic_agent",
        "--rdzv-id=$ID",
        "--x=${ID}",
        "train.py",
        "--lr=$ID",
    ]
    assert fill_options(words, {"ID": "7"}) == [*words[:4], "--rdzv-id=7", "--x=7", *words[6:]]
    assert split_words(["--a=1", "train.py", "--b"]) == (["--a=1"], ["train.py", "--b"])


@pytest.mark.parametrize(("option", "reason"), [("--x=$ID", "ID is not set"), ("--x=1$", "line 1")])
def test_a_variable_that_is_not_set_is_named(option: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        fill_options(["python", "-u", "node.py", "elastic_agent", option, "train.py"], {})


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 30, child_process.MOST_FILES),
        (1024, resource.RLIM_INFINITY, child_process.MOST_FILES),
        (1 << 20, 1 << 30, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_workers_may_open_as_many_files_as_the_site_permits(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, then: int | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    child_process.raise_file_limit()
    assert limits == ([] if then is None else [(then, hard)])
