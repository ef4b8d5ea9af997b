"""`hpc-ddp attach` on a node: py-spy is a stand-in, and the worker a process that sleeps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.process import SHOW_STACKS, STACKS, _began
from hpc_ddp.node import attach
from tests.waiting import wait_until
from unit.fakes import Clock


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[int]:
    """A process whose Python, by its own account, lies in `tmp_path`; of rank 0 there."""
    (tmp_path / "deep").mkdir()
    env = {"HPC_DDP_NODE_FOLDER": str(tmp_path), "RANK": "0", "MINE": "a=b", "HPC_DDP_RUN": "/r"}
    argv = [str(tmp_path / "python"), "600"]
    with subprocess.Popen(argv, executable="/bin/sleep", env=env, cwd=tmp_path / "deep") as process:
        # The kernel closes Popen's pipe a moment before the new program has its environment.
        wait_until(Path(f"/proc/{process.pid}/environ").read_bytes, "the worker's environment")
        (tmp_path / "rank-0.pid").write_text(f"{process.pid} {_began(process.pid)}")
        yield process.pid
        process.kill()


def _py_spy(folder: Path, code: int) -> None:
    (folder / "py-spy").write_text(f'#!/bin/bash\necho "$@"; exit {code}\n')
    (folder / "py-spy").chmod(0o755)


def test_py_spy_beside_the_workers_python_is_used(
    tmp_path: Path, worker: int, capfd: pytest.CaptureFixture[str]
) -> None:
    _py_spy(tmp_path, 0)
    assert attach.main([str(tmp_path / "rank-0.pid"), "stacks"]) == 0
    assert capfd.readouterr().out == f"dump --pid {worker}\n"


@pytest.mark.parametrize(
    ("code", "why"), [(1, "py-spy may not look at it"), (None, "there is no py-spy beside /")]
)
def test_a_missing_py_spy_is_reported(
    tmp_path: Path, worker: int, capfd: pytest.CaptureFixture[str], code: int | None, why: str
) -> None:
    if code is not None:
        _py_spy(tmp_path, code)
    assert attach.main([str(tmp_path / "rank-0.pid"), "stacks"]) == 1
    error, hint = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: {why}")
    assert hint == f"hint: {tmp_path}/python -m pip install py-spy"
    assert Path(f"/proc/{worker}").exists()


def test_no_py_spy_of_the_working_directory_is_taken(
    tmp_path: Path, worker: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be a stranger's; the folder of a bare `python`, and parts of PATH, lead there."""
    (here := tmp_path / "here").mkdir()
    _py_spy(here, 0)
    monkeypatch.chdir(here)
    monkeypatch.setattr(attach, "environment_of", lambda pid: {"PATH": ":."})
    assert attach.main([str(tmp_path / "rank-0.pid"), "stacks"]) == 1
    assert "there is no py-spy" in capfd.readouterr().err


Script = Callable[[str], int]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    """Start a worker that keeps its stacks in a file, and meets the signal as a line says."""
    processes: list[subprocess.Popen[bytes]] = []
    python = tmp_path / "python"
    python.symlink_to(os.path.realpath(sys.executable))

    def start(line: str) -> int:
        code = (
            "import faulthandler, os, signal, time\n"
            f"number, file = {int(SHOW_STACKS)}, os.memfd_create({STACKS!r})\n"
            "os.write(file, b'an earlier answer')\n"
            f"{line}\n"
            f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
            # In short sleeps: a signal that comes just before a sleep begins is not handled in it.
            "while True: time.sleep(0.05)\n"
        )
        env = {"HPC_DDP_NODE_FOLDER": str(tmp_path)}
        processes.append(subprocess.Popen([str(python), "-ISc", code], env=env))
        pid = processes[0].pid
        (tmp_path / "rank-0.pid").write_text(f"{pid} {_began(pid)}")
        wait_until((tmp_path / "ready").exists, "the worker's start")
        return processes[0].pid

    yield start
    for process in processes:
        process.kill()
        process.wait()


def _stacks_of(pid: int) -> Path:
    paths = Path(f"/proc/{pid}/fd").iterdir()
    return next(path for path in paths if STACKS in os.readlink(path))


def test_a_worker_writes_its_own_stacks(
    tmp_path: Path,
    script: Script,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    stacks = _stacks_of(script("faulthandler.register(number, file)"))
    monkeypatch.setattr(attach, "time", clock)
    monkeypatch.setattr(
        clock,
        "sleep",
        lambda _: wait_until(lambda: b"<module>\n" in stacks.read_bytes(), "all of it"),
    )
    assert attach.main([str(tmp_path / "rank-0.pid"), "stacks"]) == 0
    text = capfd.readouterr().out
    assert text.startswith(("Current thread", "Thread"))
    assert text.endswith(" in <module>\n")


def test_a_worker_that_would_die_of_the_signal_is_not_signalled(
    tmp_path: Path, script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    script("pass")
    assert attach.main([str(tmp_path / "rank-0.pid"), "stacks"]) == 1
    assert "has not called hpc_ddp's start" in capfd.readouterr().err


def test_a_worker_that_keeps_no_stacks_is_not_signalled(
    tmp_path: Path, script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    script("os.close(file); signal.signal(number, lambda *_: os._exit(1))")
    assert attach.main([str(tmp_path / "rank-0.pid"), "stacks"]) == 1
    assert "has not called hpc_ddp's start" in capfd.readouterr().err


def test_a_worker_that_does_not_answer_is_not_waited_for(
    tmp_path: Path,
    script: Script,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ticking(Clock):
        """A clock that goes on while it is looked at."""

        def monotonic(self) -> float:
            self.now += 0.001
            return self.now

    clock = Ticking()
    monkeypatch.setattr(attach, "time", clock)
    pid = script("signal.signal(number, lambda *_: None)")
    assert attach.main([str(tmp_path / "rank-0.pid"), "stacks"]) == 1
    assert capfd.readouterr().err == f"error: process {pid} gave no answer within 5 s\n"
    assert abs(sum(clock.slept) - attach.ANSWER_S) < 1


def test_an_answer_is_shown_once_it_is_whole(
    tmp_path: Path,
    script: Script,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker writes a part at each signal: three more come while its answer is waited for."""
    clock = Clock()
    pid = script("signal.signal(number, lambda *_: os.write(file, b'part '))")
    stacks = _stacks_of(pid)
    size = stacks.stat().st_size

    def wait(seconds: float) -> None:
        clock.slept.append(seconds)
        parts = min(len(clock.slept), 4)
        wait_until(lambda: stacks.stat().st_size >= size + parts * len("part "), "another part")
        if parts < 4:
            os.kill(pid, SHOW_STACKS)
            wait_until(lambda: stacks.stat().st_size > size + parts * len("part "), "the next part")

    monkeypatch.setattr(clock, "sleep", wait)
    monkeypatch.setattr(attach, "time", clock)
    assert attach.main([str(tmp_path / "rank-0.pid"), "stacks"]) == 0
    assert capfd.readouterr().out == "part " * 4


@pytest.mark.parametrize("text", ["", "x", "999999999 1", "PID 1", "PID"])
def test_a_dead_worker_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.pid").write_text(text.replace("PID", str(os.getpid())))
    with pytest.raises(HpcDdpError, match=r"rank-0 has no process on \S+ now$"):
        attach.worker_of(tmp_path / "rank-0.pid")


def test_a_worker_that_can_not_be_seen_is_not_called_dead(tmp_path: Path) -> None:
    """As from another container of the same kind."""
    (tmp_path / "rank-0.pid").write_text(f"{os.getpid()} 1 pid:[1]")
    with pytest.raises(HpcDdpError, match=r"or one in a container that can't be seen from here$"):
        attach.worker_of(tmp_path / "rank-0.pid")


def test_a_command_takes_the_workers_place_but_for_its_rank(
    tmp_path: Path, worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, list[str], dict[str, str], str]] = []
    monkeypatch.setattr(
        os, "execvpe", lambda file, argv, env: calls.append((file, argv, env, os.getcwd()))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TERM", raising=False)
    assert attach.main([str(tmp_path / "rank-0.pid"), "run", "ls", "-l"]) == 0
    env = {"MINE": "a=b", "HPC_DDP_RUN": "/r", "TERM": "dumb"}
    assert calls == [("ls", ["ls", "-l"], env, str(tmp_path / "deep"))]


def test_an_unknown_command_is_reported(
    tmp_path: Path, worker: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert attach.main([str(tmp_path / "rank-0.pid"), "run", "no-such-command"]) == 1
    error = "error: no-such-command can't be started: No such file or directory\n"
    assert capfd.readouterr().err == error
