"""torchrun's agent takes the preflight's dialogue over from the node's task."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.preflight import agent_link, agent_part, bandwidth, checks
from hpc_ddp.node.preflight.messages import MARK


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HPC_DDP_NODE", "n1")
    attempt = RunFolder(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    attempt.secret.write_bytes(os.urandom(32))  # other tests run at the same time
    return SimpleNamespace(attempt=attempt, node="n1")


# The two processes of a node: the task of the preflight, and a fork of torchrun's agent.
SETTING = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.node.net.names_and_ports import listen_on_any_port
from hpc_ddp.node.preflight import agent_link
place = SimpleNamespace(attempt=AttemptFolder(Path(sys.argv[1])), node="n1")
"""
TASK = """
with listen_on_any_port() as store_socket:
    print(store_socket.getsockname()[1], flush=True)
    print(agent_link.pass_dialogue(place, store_socket))
"""
AGENT = """
connection, store_socket = agent_link.take_dialogue(place)
os.write(1, b"here\\n")
line = sys.stdin.readline().strip()
os.write(1, f"{line} {store_socket.getsockname()[1]}\\n".encode())
"""
# A dialogue of the right form ends with a byte.
IN_ORDER, CRASH = "connection.sendall(b'.')\n", "os._exit(9)\n"


def _start(place: Any, body: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", SETTING + body, str(place.attempt.path)]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_process_takes_the_dialogue_and_the_socket(place: Any) -> None:
    with _start(place, AGENT + IN_ORDER) as agent, _start(place, TASK) as task:
        assert task.stdin is not None
        assert task.stdout is not None
        port = task.stdout.readline().strip()
        assert task.stdout.readline() == "here\n"
        task.stdin.write("a question\n")
        task.stdin.flush()
        assert task.stdout.readline() == f"a question {port}\n"
        assert (agent.wait(60), task.wait(60)) == (0, 0)
        assert task.stdout.read() == "True\n"


def test_a_task_answers_by_itself_where_a_question_comes_before_the_agent(place: Any) -> None:
    with _start(place, TASK) as task:
        assert task.stdout is not None
        assert task.stdout.readline()
        output, _ = task.communicate("{}\n", timeout=60)
        assert (task.returncode, output) == (0, "False\n")


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_fork_that_crashes_is_a_fault_unless_its_agent_is_gone(place: Any, is_gone: bool) -> None:
    """The agent is this process."""
    patch = "agent_link.AGENT_S = 0\nagent_link.process.identity = lambda pid: {'began': None}\n"
    patch = patch if is_gone else "agent_link.AGENT_S = 0\n"
    with _start(place, AGENT + CRASH) as agent, _start(place, patch + TASK) as task:
        assert task.stdout is not None
        assert "here\n" in iter(task.stdout.readline, "")
        output, errors = task.communicate("a question\n", timeout=60)
        assert agent.wait(60) == 9
    assert task.returncode == (0 if is_gone else 1), errors
    assert ('"gone": "torchrun\'s agent"' in output) is is_gone
    assert ("has ended without a word" in errors) is not is_gone


def test_no_dialogue_follows_once_all_nodes_are_fit(place: Any) -> None:
    place.attempt.fit.write_text("fit")
    assert agent_link.take_dialogue(place) is None
    assert agent_part.await_outcome(place)


def test_a_stranger_with_the_name_holds_up_no_agent(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may read the name in a list of sockets, and take it between two tests."""
    for name in ("ANSWER_S", "LOOK_EVERY_S", "DISK_EVERY_S"):
        monkeypatch.setattr(agent_link, name, 0.05)
    with socket.socket(socket.AF_UNIX) as stranger, socket.socket(socket.AF_UNIX) as first:
        stranger.bind(agent_link._name(place))
        stranger.listen(0)
        first.connect(agent_link._name(place))  # which fills the queue
        later = threading.Timer(0.5, place.attempt.fit.write_text, ["fit"])
        later.start()
        assert agent_link.take_dialogue(place) is None
        later.join()


def test_a_task_without_the_name_answers_by_itself(place: Any) -> None:
    with socket.socket(socket.AF_UNIX) as stranger, _start(place, TASK) as task:
        stranger.bind(agent_link._name(place))
        output, errors = task.communicate(timeout=60)
    assert task.returncode == 0, errors
    assert "another process has the name" in output
    assert output.endswith("\nFalse\n")


def test_another_user_gets_no_dialogue(place: Any) -> None:
    strict = "agent_link._is_this_user = lambda _, answers=iter([False, True]): next(answers)\n"
    with _start(place, strict + TASK) as task:
        assert task.stdout is not None
        assert task.stdout.readline()
        stranger = _connect(place)
        with stranger:
            assert stranger.recv(10) == b""
        with _connect(place) as agent:
            assert agent_link._is_this_user(agent)
            agent.sendall(b"1")
            _, files, _, _ = socket.recv_fds(agent, 1, 3)
            for file in files:
                os.close(file)
            assert len(files) == 3
            agent.sendall(b".")
        assert task.wait(60) == 0


def _connect(place: Any) -> socket.socket:
    """Return a connection to the preflight's task, which listens in a moment."""
    connection = socket.socket(socket.AF_UNIX)
    while connection.connect_ex(agent_link._name(place)):
        time.sleep(0.05)
    connection.settimeout(60)
    return connection


@pytest.mark.parametrize("fit", [True, False])
def test_a_fork_answers_in_each_round(
    place: Any, monkeypatch: pytest.MonkeyPatch, fit: bool, tmp_path: Path
) -> None:
    """The first round ends without a word, in the second one the fork fails."""
    rounds, caller = tmp_path / "rounds", os.getpid()

    def take(place: Any) -> tuple[Any, Any]:
        return socket.socketpair()

    def answer(place: Any, store_socket: socket.socket) -> bool:
        assert os.getpid() != caller
        with rounds.open("a") as file:
            file.write("x")
        if len(rounds.read_text()) == 1:
            raise EOFError
        if len(rounds.read_text()) == 2:
            raise RuntimeError("a broken device")
        return fit

    monkeypatch.setattr(agent_part, "take_dialogue", take)
    monkeypatch.setattr(agent_part, "answer_on_torch", answer)
    assert agent_part.await_outcome(place) is fit
    assert rounds.read_text() == "xxx"


def test_the_last_question_is_the_outcome(
    place: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the node itself is no member of the group."""
    groups: list[Any] = []
    monkeypatch.setattr(checks, "_set_network", lambda place: None)
    monkeypatch.setattr(bandwidth, "import_torch", lambda: "torch")
    monkeypatch.setattr(bandwidth, "measure_group", lambda *words: groups.append(words))
    group = {"host": "h", "port": 5, "device": "cpu", "first": 1, "timeout_s": 9.0}
    for fit in (True, False):
        questions: list[dict[str, Any]] = [
            {"members": ["n2", "n3"], **group},
            {"members": ["n1", "n2"], **group},
            {"fit": fit},
        ]
        lines = iter([json.dumps(question) + "\n" for question in questions])
        stdin = SimpleNamespace(readline=lambda lines=lines: next(lines, ""))
        monkeypatch.setattr(sys, "stdin", stdin)
        server: Any = "server"
        assert checks.answer_on_torch(place, server) is fit
        with pytest.raises(EOFError):
            checks.answer_on_torch(place, server)
    assert [words[3].members for words in groups] == [["n1", "n2"]] * 2
    assert MARK not in capfd.readouterr().out
