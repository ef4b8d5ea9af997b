"""A supervisor starts its workers; they are stand-ins."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import child_process, supervisor
from hpc_ddp.node.net import names_and_ports
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.supervisor import Supervisor
from unit.fakes import Clock
from unit.node.outcome.fakes import decide_by, event_of
from unit.node.supervisor.fakes import COMMAND, Agent, make_supervisor


@pytest.mark.parametrize("error", [KeyError("nodes"), ValueError("attempt.json")])
def test_a_supervisor_without_a_place_reports_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(environ: dict[str, str]) -> None:
        raise error

    monkeypatch.setattr(Place, "from_env", refuse)
    assert supervisor.main(["torchrun", "true"]) == 1
    assert f"can't take part: its place in the job is unknown: {error!r}" in capfd.readouterr().err


@pytest.mark.parametrize("missing", ["HPC_DDP_RUN", "SLURM_NODEID"])
def test_a_python_without_the_jobs_variables_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    missing: str,
) -> None:
    run = RunFolder(tmp_path / "run").make()
    run.claim_attempt({"nodes": [socket.gethostname()]}, lambda identity: False)
    library = str(run.lib / "hpc_ddp" / "node" / "child_process.py")
    monkeypatch.setattr(child_process, "__file__", library)
    for name in ("SLURM_NODEID", "HPC_DDP_NODE_INDEX", "HPC_DDP_STEP_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HPC_DDP_RUN", "" if missing == "HPC_DDP_RUN" else str(run.path))
    assert supervisor.main(["torchrun", "true"]) == 1
    words = f"this Python does not get the job's variables ({missing} is missing)"
    assert f"can't take part: {words}" in capfd.readouterr().err
    started = event_of("started", job_id="7", restarts=0, host="n", nodes=["n"])
    events = (replace(started, time=time.time()),)
    verdict = decide_by(records=run.attempt(0).records(), events=events)
    assert (verdict.cause, verdict.action) == (Cause.FAILED, Action.GIVE_UP)
    assert words in verdict.why


@pytest.mark.parametrize(("index", "is_host"), [(0, "1"), (1, "0")])
def test_each_node_knows_the_host_of_the_store(
    attempt: AttemptFolder, index: int, is_host: str
) -> None:
    watcher = make_supervisor(attempt, index=index)
    conf, address = f"--rdzv-conf=a=1,is_host={is_host}", f"--local-addr=n{index + 1}"
    assert watcher.launch.command == [*COMMAND[:6], conf, address, *COMMAND[6:]]
    plain = make_supervisor(attempt, *COMMAND[:4], "train.py", index=index)
    assert plain.launch.command[4] == f"--rdzv-conf=is_host={is_host}"


def test_workers_get_their_variables(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "interface_env", lambda place: {"A": "1"})
    watcher = make_supervisor(attempt, index=1)
    env = watcher._make_env()
    assert (env["HPC_DDP_NODE"], env["A"]) == ("n2", "1")
    assert env["HPC_DDP_NODE_FOLDER"] == str(attempt.path / "n2")
    assert env["HPC_DDP_NOTICE"] == str(watcher.folder.notice)
    prefix = env["HPC_DDP_STORE_PREFIX"]
    assert prefix == make_supervisor(attempt, index=2)._make_env()["HPC_DDP_STORE_PREFIX"]
    attempt.secret.write_bytes(b"another attempt's")
    assert prefix != watcher._make_env()["HPC_DDP_STORE_PREFIX"]


def _run(watcher: Supervisor, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(watcher, "_start", lambda: agent)
    return watcher.run()


def test_a_node_whose_peer_has_failed_already_does_not_start(attempt: AttemptFolder) -> None:
    attempt.failed.write_text("n2")
    assert make_supervisor(attempt).run() == 1
    assert not (attempt.node("n1").record).exists()


def test_a_start_removes_files_of_an_earlier_one(attempt: AttemptFolder) -> None:
    folder = attempt.node("n1")
    folder.path.mkdir()
    for path in (folder.failures, folder.path / "rank-0.pid"):
        path.write_text("{}")
    make_supervisor(attempt)
    assert list(folder.path.iterdir()) == [folder.failures]
    assert folder.failures.read_text() == ""  # torchrun may find no room for a new file


def test_a_missing_python_is_recorded(attempt: AttemptFolder, clock: Clock) -> None:
    watcher = make_supervisor(
        attempt, "/no/python", "-u", "node.py", "elastic_agent", "train.py", nodes=("n1",)
    )
    assert watcher.run() == 1
    (failure,) = read_json(watcher.folder.record)["failures"]
    assert (failure["rank"], failure["code"]) == (None, 127)
    assert "No such file or directory: '/no/python'" in failure["error"]


def test_a_wrapper_of_python_outlives_a_notice(attempt: AttemptFolder) -> None:
    """A site may signal each process of the step, and torchrun's agent dies with its parent."""
    ends = "for name in TERM INT HUP USR1 USR2; do kill -$name $$; done; exit 3"
    watcher = make_supervisor(attempt, "sh", "-c", ends, "elastic_agent", "train.py")
    assert watcher._start().wait() == 3


@pytest.mark.parametrize(
    ("variables", "python"),
    [
        ({"SLURM_JOB_ID": "7"}, sys.executable),  # the batch script has started this one by it
        ({"SLURM_JOB_ID": "7", "SUBMITIT_EXECUTOR": "slurm"}, "wrapper"),
        ({}, "wrapper"),  # a dry run, by hpc-ddp's own Python
    ],
)
def test_a_wrapper_of_python_is_entered_once(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], python: str
) -> None:
    commands: list[list[str]] = []

    def launch(place: None, command: list[str]) -> None:
        commands.append(command)
        raise OSError

    monkeypatch.setattr(Place, "from_env", lambda environ: None)
    monkeypatch.setattr(supervisor, "LAUNCHES", {"worker": launch})
    for name in ("SLURM_JOB_ID", "SUBMITIT_EXECUTOR"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert supervisor.main(["worker", "wrapper", "train.py"]) == 1
    assert commands == [[python, "train.py"]]


def test_a_first_node_without_an_address_is_recorded(
    attempt: AttemptFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun would look for it for ten minutes and more, in a log that is not the job's."""
    check = partial(names_and_ports.check_resolves, wait_s=0)
    monkeypatch.setattr(supervisor, "check_resolves", check)
    names = ("n1.invalid", "n2.invalid")
    watcher = make_supervisor(attempt, *COMMAND, nodes=names)
    assert watcher.run() == 1
    (failure,) = read_json(watcher.folder.record)["failures"]
    assert "the name n1.invalid can't be looked up on" in failure["error"]


def test_a_good_start_is_recorded(
    attempt: AttemptFolder,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    watcher = make_supervisor(attempt)
    watcher.folder.rank_log(0).write_bytes(b"hello\xff\n")
    assert _run(watcher, Agent(), monkeypatch) == 0
    assert capfdbinary.readouterr().out == b"hello\xff\n"
    assert read_json(watcher.folder.record) == {
        **{"node": "n1", "tasks": 1, "code": 0, "notice": None, "torn_down": None},
        **{"killed": False, "idle": False, "stood_still": False, "left": False, "failures": []},
    }
    assert watcher.folder.printed.read_text().endswith(" 0 7\n")
    assert not attempt.failed.read_text()


def test_an_elastic_node_without_its_leader_is_killed(
    attempt: AttemptFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = threading.Event()
    lost.set()
    monkeypatch.setattr(supervisor, "watch_head", lambda place, environ: lost)
    monkeypatch.setattr(supervisor, "take_over_verdict", lambda *words: None)
    agent = Agent(-9)
    watcher = make_supervisor(attempt, *COMMAND[:4], "--nnodes=1:2", "train.py", index=1)
    watcher._kill_at = 0.0
    assert _run(watcher, agent, monkeypatch) == 1
    assert agent.killed
    rigid = Agent(0)
    assert _run(make_supervisor(attempt, index=1), rigid, monkeypatch) == 0
    assert not rigid.killed


def test_the_first_supervisor_alone_looks_for_its_peers(attempt: AttemptFolder) -> None:
    """Each of thousands looking for each would be a square of look-ups on the shared disk."""
    watchers = [make_supervisor(attempt, index=index) for index in range(3)]
    assert [len(watcher.launch.peers) for watcher in watchers] == [3, 0, 0]
    attempt.failed.write_text("n2")
    assert [watcher.run() for watcher in watchers] == [1, 0, 0]


def test_a_node_that_can_not_take_part_reports_why(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"RUN": attempt.path.parents[1], "ATTEMPT": 0, "STEP_LAUNCHER": "mpirun"}
    for name, value in values.items():
        monkeypatch.setenv(f"HPC_DDP_{name}", str(value))
    monkeypatch.delenv("HPC_DDP_NODE_INDEX", raising=False)
    assert supervisor.main(["x"]) == 1
    assert "this node can't take part: this host, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "command", "expanded"),
    [
        ("worker", ["python", "$a.py"], ["python", "$a.py", "--x=$a"]),
        (
            "torchrun",
            ["python", "-u", "node.py", "elastic_agent", "--n=$a", "t.py"],
            ["python", "-u", "node.py", "elastic_agent", "--n=5", "t.py", "--x=$a"],
        ),
    ],
)
def test_submitits_task_ends_with_the_supervisors_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    command: list[str],
    expanded: list[str],
) -> None:
    calls: list[list[str]] = []
    handlers: list[tuple[int, Any]] = []

    def supervise(argv: list[str]) -> int:
        calls.append(argv)
        return 3

    monkeypatch.setattr(supervisor, "main", supervise)
    monkeypatch.setattr(signal, "signal", lambda *words: handlers.append(words))
    monkeypatch.setenv("HPC_DDP_RUN", str(tmp_path))
    monkeypatch.setenv("a", "5")
    monkeypatch.setenv("HPC_DDP_UMASK", "22")  # is set anew
    (tmp_path / "job.json").write_text('{"args": ["--x=$a"]}')
    with pytest.raises(SystemExit, match=r"^3$"):
        supervisor.submitit_main(kind, command)
    assert calls == [[kind, *expanded]]
    assert handlers == [(signal.SIGCONT, signal.SIG_DFL)]  # submitit's own logs each


@pytest.mark.parametrize("content", [None, "{", '{"args": []}'])
def test_submitits_task_that_can_not_start_says_why(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "patiently", lambda call: call())
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    monkeypatch.setenv("HPC_DDP_UMASK", "22")  # is set anew
    monkeypatch.setenv("HPC_DDP_RUN", str(tmp_path))
    if content:
        (tmp_path / "job.json").write_text(content)
    with pytest.raises(SystemExit) as ended:  # the last by an option of torchrun
        supervisor.submitit_main(
            "torchrun", ["python", "-u", "node.py", "agent", "--x=$NO_SUCH", "t.py"]
        )
    assert "this node can't take part" in str(ended.value.code)
    assert ("NO_SUCH is not set" in str(ended.value.code)) is (content == '{"args": []}')
